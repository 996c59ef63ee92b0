"""Metrics of steps under LoRAX's names: how many ran, succeeded and failed, and how long they took.

A step has no phase. One that computed the rest of a prompt, or more tokens than requests without output, is what LoRAX
calls a prefill.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.metrics.histogram import Counter, Histogram, families, histogram_family

PREFILL, DECODE = "prefill", "decode"


class StepMetrics:
    """Step metrics of all shards of one router."""

    def __init__(self, durations: Sequence[float]) -> None:
        """`durations`: bounds in seconds."""
        self.count = Counter("lorax_batch_inference_count", "Steps", "method")
        self.success = Counter("lorax_batch_inference_success", "Steps that succeeded", "method")
        self.failure = Counter(
            "lorax_batch_inference_failure", "Steps that failed; their requests are retried", "method"
        )
        text = "Messages with requests to a shard that runs others, which they join"
        self.concatenated = Counter("lorax_batch_concat", text, "reason")
        self.durations = {PREFILL: Histogram(durations), DECODE: Histogram(durations)}
        for counter in (self.count, self.success, self.failure):
            for method in (PREFILL, DECODE):
                counter.add(0, method)
        self.concatenated.add(0, "backpressure")
        self.has_ended_prompt = False
        """Whether a request got its first token since the last message."""
        self.has_failed = False
        """Whether a step failed since the last message."""
        self._last: dict[int, int] = {}
        """The number of the last step of each shard."""

    def observe(self, output: pb.StepOutput, num_tokens: int, index: int) -> int:
        """One message of shard `index`, after its `num_tokens` tokens were delivered; returns the number of new steps.

        The number of a step tells whether it was counted: heartbeats repeat the last one, and a message may cover
        several. Duration and size are those of the last one.
        """
        before = self._last.get(index)
        self._last[index] = max(output.step, before or 0)
        num_new = int(bool(output.outputs)) if before is None else output.step - before
        if num_new <= 0:
            return 0
        load = output.load
        is_prefill = self.has_ended_prompt or (not num_tokens and load.step_tokens > load.num_running)
        failed, seconds = self.has_failed, load.step_ms / 1000
        self.has_ended_prompt = self.has_failed = False
        for method, number in ((PREFILL, int(is_prefill)), (DECODE, num_new - is_prefill)):
            if number:
                num_failed = int(failed and (method == PREFILL or not is_prefill))
                self._add(method, number, num_failed, seconds)
        return num_new

    def _add(self, method: str, number: int, num_failed: int, seconds: float) -> None:
        self.count.add(number, method)
        self.success.add(number - num_failed, method)
        if num_failed:
            self.failure.add(num_failed, method)
        if number > num_failed:
            self.durations[method].observe(seconds, number - num_failed)

    def forget(self, index: int) -> None:
        """A shard is gone: its next stream may count from another number."""
        self._last.pop(index, None)

    def collect(self) -> Iterator[Metric]:
        """Prometheus families."""
        yield from families(self)
        yield histogram_family("lorax_batch_inference_duration", "Seconds per step", "method", self.durations)
