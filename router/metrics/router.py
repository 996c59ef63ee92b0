"""What operators see: LoRAX's metric names with its labels, and ours beside them as `lorikeet_*`.

Observing is a bisection and two additions, because some of it happens for every token; the Prometheus form and
LoRAX's JSON form are made when asked for.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.utils import floatToGoString

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.metrics.adapters import AdapterMetrics
from lorikeet.router.metrics.histogram import Counter, Histogram
from lorikeet.router.metrics.speculation import BASE, SpeculationMetrics
from lorikeet.router.requests.adapter_ref import Adapter
from lorikeet.router.requests.speculation_stats import num_emitted

PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DURATIONS = [0.00015 * 1.5**power for power in range(35)]
_STEPS = [
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
]


def _linear(top: int) -> list[float]:
    return [top * (index + 1) / 100 for index in range(100)]


class Metrics:
    """Everything one router counts. Routes report requests; the dispatcher reports generations and shards."""

    def __init__(self, max_input_length: int = 4095, max_total_tokens: int = 4096) -> None:
        # LoRAX's names.
        self.request_count = Counter()
        self.request_success = Counter()
        self.request_failure = Counter()
        self.request_duration = Histogram(_DURATIONS)
        self.request_validation_duration = Histogram(_DURATIONS)
        self.request_queue_duration = Histogram(_DURATIONS)
        self.request_inference_duration = Histogram(_DURATIONS)
        self.request_mean_time_per_token_duration = Histogram(_DURATIONS)
        self.request_input_length = Histogram(_linear(max_input_length))
        self.request_generated_tokens = Histogram(_linear(max_total_tokens))
        self.request_max_new_tokens = Histogram(_linear(max_total_tokens))
        self.request_skipped_tokens = Histogram([])
        self.batch_next_size = Histogram(range(1, 1025))
        self.batch_count = Counter()
        self.batch_success = Counter()
        self.batch_duration = {"prefill": Histogram(_DURATIONS), "decode": Histogram(_DURATIONS)}
        # Ours.
        self.time_to_first_token = Histogram(_DURATIONS)
        self.inter_token_latency = Histogram(_STEPS)
        self.queue_seconds = Histogram(_DURATIONS)
        self.batch_sent = Histogram([2**power for power in range(11)])
        self.prompt_tokens = Counter()
        self.generated_tokens = Counter()
        self.cached_prompt_tokens = Counter()
        self.prefix_hits = Counter()
        self.preemptions = Counter()
        self.step_gap_seconds = Counter()
        self.drafted_tokens = Counter()
        self.accepted_tokens = Counter()
        self.aborts = Counter()
        self.shard_messages = Counter()
        self.shard_reconnects = Counter()
        self.requests_moved = Counter()
        self.placements = Counter()
        self.usage_dropped = Counter()
        self.adapters = AdapterMetrics()
        self.speculation = SpeculationMetrics()
        self.gauges: dict[str, float] = {}
        """Gauges by full name; the dispatcher sets them as shards speak."""
        self._page_size = 0
        self._num_pages: dict[int, int] = {}
        self._loads: dict[int, pb.Load] = {}
        """What each shard said last."""

    # What routes report

    def request_arrived(self) -> None:
        self.request_count.add()

    def request_succeeded(self, seconds: float) -> None:
        """A request was answered in full, `seconds` after it arrived."""
        self.request_success.add()
        self.request_duration.observe(seconds)

    def request_failed(self, reason: str) -> None:
        """`reason`: overloaded, validation, generation, incomplete, dropped, template, bad_request, timeout, …"""
        self.request_failure.add(1, reason)

    def request_validated(self, seconds: float) -> None:
        self.request_validation_duration.observe(seconds)

    # What the dispatcher reports

    def set_info(self, info: pb.ShardInfo, index: int = 0) -> None:
        """What shard `index` says of itself."""
        self._page_size = info.page_size
        self._num_pages[index] = info.num_pages
        self.gauges["lorikeet_kv_pages"] = sum(self._num_pages.values())

    def record_output(self, output: pb.StepOutput, num_tokens: int, index: int = 0) -> None:
        """One message of shard `index`, with `num_tokens` tokens in it."""
        self.shard_messages.add()
        self.generated_tokens.add(num_tokens)
        if not output.HasField("load"):
            return
        load = output.load
        before = self._loads.get(index)
        self._loads[index] = load
        if before is not None and load.gap_us > before.gap_us:
            self.step_gap_seconds.add((load.gap_us - before.gap_us) / 1e6)
        if load.num_preempted:
            self.preemptions.add(load.num_preempted)
        if load.step_tokens:
            # A step has no phase; one that computes more than a token per request is what LoRAX calls a prefill.
            method = "prefill" if load.step_tokens > load.num_running else "decode"
            self.batch_count.add(1, method)
            self.batch_success.add(1, method)
            self.batch_duration[method].observe(load.step_ms / 1000)

    def request_sent(self, waited_seconds: float, num_prompt: int) -> None:
        """A request left the queue."""
        self.queue_seconds.observe(waited_seconds)
        self.request_queue_duration.observe(waited_seconds)
        self.prompt_tokens.add(num_prompt)

    def batch_left(self, num_requests: int) -> None:
        self.batch_sent.observe(num_requests)
        self.batch_next_size.observe(num_requests)

    def first_token(self, seconds: float, num_cached: int) -> None:
        """`num_cached` tokens of the prompt were found in the prefix cache."""
        self.time_to_first_token.observe(seconds)
        if num_cached:
            self.prefix_hits.add()
            self.cached_prompt_tokens.add(num_cached)

    def speculation_stats(self, output: pb.RequestOutput, num_kept: int, adapter: Adapter | None, digest: str) -> None:
        """A message tells of drafts; the first `num_kept` of its tokens are in the request's text."""
        self.drafted_tokens.add(sum(output.num_drafted))
        self.accepted_tokens.add(num_emitted(output, num_kept))
        label = BASE if adapter is None else self.adapters.label(adapter, digest)
        self.speculation.observe(output, num_kept, label)

    def generation_ended(
        self, seconds: float, num_generated: int, num_skipped: int, num_prompt: int, max_new_tokens: int
    ) -> None:
        """`seconds` since the request was sent."""
        self.request_inference_duration.observe(seconds)
        self.request_mean_time_per_token_duration.observe(seconds / num_generated)
        self.request_generated_tokens.observe(num_generated)
        self.request_skipped_tokens.observe(num_skipped)
        self.request_input_length.observe(num_prompt)
        self.request_max_new_tokens.observe(max_new_tokens)

    # What operators ask

    def prometheus(self) -> bytes:
        """The text format; prometheus_client's own writer would add `_total` to LoRAX's counter names."""
        lines = []
        for family in self.collect():
            lines.append(f"# HELP {family.name} {family.documentation}\n# TYPE {family.name} {family.type}\n")
            for sample in family.samples:
                labels = _labels(sample.labels)
                lines.append(f"{sample.name}{labels} {floatToGoString(sample.value)}\n")
        return "".join(lines).encode()

    def lorax_json(self) -> bytes:
        """`{name: {"type", "data": [{"key", "value"}]}}`; keys are sum, count, `name{labels}` or empty."""
        result: dict[str, Any] = {}
        for family in self.collect():
            data = [
                {"key": _json_key(family.name, sample.name, sample.labels), "value": sample.value}
                for sample in family.samples
            ]
            result[family.name] = {"type": family.type, "data": data}
        return orjson.dumps(result)

    def shard_gone(self, index: int) -> None:
        """Nothing runs there any more."""
        self._loads.pop(index, None)
        self._num_pages.pop(index, None)
        self.gauges["lorikeet_kv_pages"] = sum(self._num_pages.values())

    def render(self, accept: str) -> tuple[bytes, str]:
        """Body and content type by the request's Accept header: JSON when asked for, else Prometheus text."""
        if "application/json" in accept:
            return self.lorax_json(), "application/json"
        return self.prometheus(), PROMETHEUS_TYPE

    def collect(self) -> Iterator[Metric]:
        """Prometheus families of everything counted so far."""
        yield from self._requests()
        yield from self._batches()
        yield from self._own()
        yield from self.adapters.collect()
        yield from self.speculation.collect()
        self._note_loads()
        for name, value in self.gauges.items():
            yield GaugeMetricFamily(name, _GAUGES.get(name, name), value=value)

    def _note_loads(self) -> None:
        """Gauges are of all shards together."""
        if not self._loads:
            return
        loads, gauges = self._loads.values(), self.gauges
        used = sum(load.used_pages for load in loads)
        gauges["lorikeet_running_requests"] = sum(load.num_running for load in loads)
        gauges["lorax_batch_current_size"] = gauges["lorikeet_running_requests"]
        gauges["lorax_batch_current_max_tokens"] = used * self._page_size
        gauges["lorikeet_shard_waiting_requests"] = sum(load.num_waiting for load in loads)
        gauges["lorikeet_kv_pages_used"] = used
        gauges["lorikeet_kv_pages_cached"] = sum(load.cached_pages for load in loads)

    def _requests(self) -> Iterator[Metric]:
        yield _counter("lorax_request_count", "Requests that arrived", self.request_count)
        yield _counter("lorax_request_success", "Requests answered in full", self.request_success)
        yield _counter("lorax_request_failure", "Requests that failed, by reason", self.request_failure, "err")
        for name in (
            "request_duration",
            "request_validation_duration",
            "request_queue_duration",
            "request_inference_duration",
            "request_mean_time_per_token_duration",
            "request_input_length",
            "request_generated_tokens",
            "request_max_new_tokens",
        ):
            yield _histogram(f"lorax_{name}", name.replace("_", " "), getattr(self, name))
        skipped = self.request_skipped_tokens
        yield SummaryMetricFamily(
            "lorax_request_skipped_tokens",
            "Tokens beyond the first of their step, per request",
            count_value=skipped.count,
            sum_value=skipped.sum,
        )

    def _batches(self) -> Iterator[Metric]:
        yield _counter("lorax_batch_inference_count", "Steps", self.batch_count, "method")
        yield _counter("lorax_batch_inference_success", "Steps that succeeded", self.batch_success, "method")
        durations = HistogramMetricFamily("lorax_batch_inference_duration", "Seconds per step", labels=["method"])
        for method, histogram in self.batch_duration.items():
            durations.add_metric([method], buckets=histogram.buckets(), sum_value=histogram.sum)
        yield durations
        yield _histogram("lorax_batch_next_size", "Requests per message to a shard", self.batch_next_size)

    def _own(self) -> Iterator[Metric]:
        for name, text in _HISTOGRAMS.items():
            yield _histogram(f"lorikeet_{name}", text, getattr(self, name))
        for name, text in _COUNTERS.items():
            yield _counter(f"lorikeet_{name}_total", text, getattr(self, name))
        text = "Requests sent to a shard, by why that one was chosen"
        yield _counter("lorikeet_placements_total", text, self.placements, "reason")
        text = "Ended requests that could not be told to the operator's file or URL"
        yield _counter("lorikeet_usage_dropped_total", text, self.usage_dropped, "to")


_HISTOGRAMS = {
    "time_to_first_token": "Seconds from a request's arrival in the queue to its first token",
    "inter_token_latency": "Seconds between tokens of one request",
    "queue_seconds": "Seconds in the router's queue",
    "batch_sent": "Requests per message to a shard",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens sent to shards",
    "generated_tokens": "Tokens received from shards",
    "cached_prompt_tokens": "Prompt tokens found in the prefix cache",
    "prefix_hits": "Requests that found a part of their prompt in the prefix cache",
    "preemptions": "Requests that gave up their pages to older ones",
    "step_gap_seconds": "Seconds that devices waited for the host between steps",
    "drafted_tokens": "Draft tokens verified",
    "accepted_tokens": "Draft tokens accepted",
    "aborts": "Requests ended by the router: cancelled, or complete at a stop string",
    "shard_messages": "Messages received from shards",
    "shard_reconnects": "Streams lost",
    "requests_moved": "Requests that went on elsewhere after their shard was lost or refused them",
}
_GAUGES = {
    "lorax_queue_length": "Requests in the router's queue",
    "lorax_batch_current_size": "Requests running in the shard",
    "lorax_batch_current_max_tokens": "KV tokens that running requests hold",
    "lorikeet_running_requests": "Requests running in the shard",
    "lorikeet_shard_waiting_requests": "Requests waiting in the shard",
    "lorikeet_active_requests": "Requests inside the router, queued or running",
    "lorikeet_kv_pages": "KV pages in all",
    "lorikeet_kv_pages_used": "KV pages owned by requests",
    "lorikeet_kv_pages_cached": "KV pages kept for prefixes only",
    "lorikeet_credit_requests": "Requests that the shard could still take",
    "lorikeet_credit_kv_tokens": "KV tokens that the shard could still take",
    "lorikeet_shard_ready": "1 while the shard serves",
}


def _counter(name: str, text: str, counter: Counter, label: str = "") -> Metric:
    family = Metric(name, text, "counter")
    family.name = name  # Metric takes a final _total away
    values: Iterable[tuple[str, float]] = counter.values.items() if label else [("", counter.values.get("", 0))]
    for value, number in values:
        family.add_sample(name, {label: value} if label else {}, number)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.sum)


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _json_key(family: str, sample: str, labels: dict[str, str]) -> str:
    suffix = sample.removeprefix(family).lstrip("_")
    if suffix in ("sum", "count") and not labels:
        return suffix
    return f"{sample}{_labels(labels)}" if labels else ""
