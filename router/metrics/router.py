"""The router's metrics: LoRAX's names with its labels, and our own as `lorikeet_*`.

Observing is a bisection and two additions, because some of it happens for every token; the Prometheus form and LoRAX's
JSON form are made on request.

A step has no phase. One that computed the rest of a prompt, or more tokens than requests without output, is what LoRAX
calls a prefill.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import orjson
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.config import RouterConfig
from lorikeet.router.metrics.groups import (
    BASE,
    CALLER_LABEL,
    OTHER,
    AdapterMetrics,
    Counter,
    Histogram,
    MayName,
    MetricGroup,
    SpeculationMetrics,
    caller_label,
    counter_family,
    everything,
    families,
    histogram_family,
    without_names,
)
from lorikeet.router.metrics.vllm import PREFIX, VllmMetrics
from lorikeet.router.requests.generation import Generation, num_emitted
from lorikeet.router.requests.request import Adapter, ShardOutput

_DECISIONS = ("adopted", "rejected", "reverted", "failed")
_COUNTERS = {
    "learning_rows": ("num_rows", "Output tokens collected to learn heads from"),
    "learning_training_seconds": ("train_seconds", "Seconds of trainings"),
    "learning_cpu_seconds": ("cpu_seconds", "Processor seconds of trainings, which run where a processor is idle"),
}

FORMER_NAMES = {
    "lorikeet_time_to_first_token_seconds": "lorikeet_time_to_first_token",
    "lorikeet_inter_token_latency_seconds": "lorikeet_inter_token_latency",
    "lorikeet_dispatch_batch_size": "lorikeet_batch_sent",
    "lorikeet_device_idle_seconds_total": "lorikeet_step_gap_seconds_total",
    "lorikeet_requests_retried_total": "lorikeet_requests_moved_total",
    "lorikeet_routing_decisions_total": "lorikeet_placements_total",
}
"""Names of earlier versions, which are exported for one release more."""
_FORMER_REASONS = {
    "only_shard": "only",
    "adapter_resident": "adapter",
    "prefix_cached": "prefix",
    "adapter_affinity": "home",
    "overflow": "spread",
    "least_loaded": "credit",
}
"""Values of `reason` of lorikeet_placements_total."""


class LearningMetrics(MetricGroup):
    """Learning metrics of one router. A restarted shard counts from zero, so its earlier totals are kept."""

    def __init__(self) -> None:
        self._newest: dict[int, pb.LearningTotals] = {}
        """Newest totals by shard."""
        self._gone = pb.LearningTotals()
        """Totals of shards that are gone."""

    def observe(self, totals: pb.LearningTotals, index: int) -> None:
        """A message of shard `index`."""
        self._newest[index] = totals

    def forget(self, index: int) -> None:
        """Shard `index` is gone."""
        totals = self._newest.pop(index, None)
        for field in pb.LearningTotals.DESCRIPTOR.fields if totals is not None else ():
            setattr(self._gone, field.name, getattr(self._gone, field.name) + getattr(totals, field.name))
        self._gone.ring_bytes = 0

    def collect(self) -> Iterator[Metric]:
        """The families of all shards."""
        everything = [self._gone, *self._newest.values()]
        for name, (field, text) in _COUNTERS.items():
            yield counter_family(
                f"lorikeet_{name}_total", text, [({}, sum(getattr(totals, field) for totals in everything))]
            )
        decisions = [
            ({"decision": decision}, sum(getattr(t, f"num_{decision}") for t in everything)) for decision in _DECISIONS
        ]
        yield counter_family("lorikeet_learning_decisions_total", "Trained heads, by what became of them", decisions)
        ring_bytes = sum(totals.ring_bytes for totals in everything)
        yield GaugeMetricFamily("lorikeet_learning_ring_bytes", "Memory of the collected rows", value=ring_bytes)


PREFILL, DECODE = "prefill", "decode"


class StepMetrics(MetricGroup):
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
        num_new = int(bool(output.outputs or output.columns)) if before is None else output.step - before
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


PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DURATIONS = [0.00015 * 1.5**power for power in range(35)]
_LATENCIES = [0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03,
              0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5]  # fmt: skip
_BATCH_SIZES = [2**power for power in range(11)]
_GAUGES = {
    "lorax_queue_length": "Requests in the router's queue",
    "lorax_batch_current_size": "Requests running in the shard",
    "lorax_batch_current_max_tokens": "KV tokens that running requests hold",
    "lorikeet_running_requests": "Requests running in the shard",
    "lorikeet_shard_waiting_requests": "Requests waiting in the shard",
    "lorikeet_active_requests": "Requests inside the router, queued or running",
    "lorikeet_active_callers": "Callers with requests inside the router, or within the last two seconds",
    "lorikeet_kv_pages": "KV pages in total",
    "lorikeet_kv_pages_used": "KV pages owned by requests",
    "lorikeet_kv_pages_cached": "KV pages kept for prefixes only",
    "lorikeet_credit_requests": "Requests that the shard could still accept",
    "lorikeet_credit_kv_tokens": "KV tokens that the shard could still accept",
    "lorikeet_shard_ready": "1 while a shard accepts requests",
}


def _linear(top: int) -> list[float]:
    return [top * (index + 1) / 100 for index in range(100)]


def _duration(name: str) -> Histogram:
    return Histogram(_DURATIONS, f"lorax_{name}", name.replace("_", " "))


def _length(name: str, top: int) -> Histogram:
    return Histogram(_linear(top), f"lorax_{name}", name.replace("_", " "))


def _own(bounds: Sequence[float], name: str, text: str) -> Histogram:
    return Histogram(bounds, f"lorikeet_{name}", text)


def _counter(name: str, text: str, label: str = "") -> Counter:
    return Counter(f"lorikeet_{name}_total", text, label)


class Metrics(MetricGroup):
    """All metrics of one router. Routes report requests; the dispatcher reports generations and shards."""

    def __init__(
        self, max_input_length: int = 4095, max_total_tokens: int = 4096, vllm: VllmMetrics | None = None
    ) -> None:
        """`vllm`: vLLM's metrics, where they are exported too."""
        # LoRAX's names.
        self.request_count = Counter("lorax_request_count", "Requests that arrived")
        self.request_success = Counter("lorax_request_success", "Requests answered in full")
        self.request_failure = Counter("lorax_request_failure", "Requests that failed, by reason", "err")
        self.request_duration = _duration("request_duration")
        self.request_validation_duration = _duration("request_validation_duration")
        self.request_queue_duration = _duration("request_queue_duration")
        self.request_inference_duration = _duration("request_inference_duration")
        self.request_mean_time_per_token_duration = _duration("request_mean_time_per_token_duration")
        self.request_input_length = _length("request_input_length", max_input_length)
        self.request_generated_tokens = _length("request_generated_tokens", max_total_tokens)
        self.request_max_new_tokens = _length("request_max_new_tokens", max_total_tokens)
        text = "Tokens beyond the first of their step, per request"
        self.request_skipped_tokens = Histogram([], "lorax_request_skipped_tokens", text)
        self.batch_next_size = Histogram(range(1, 1025), "lorax_batch_next_size", "Requests per message to a shard")
        text = "Texts per request of /classify and /classify_batch"
        self.request_input_count = Histogram([], "lorax_request_input_count", text)
        text = "Entities or labels per request of /classify and /classify_batch"
        self.request_classify_output_count = Histogram([], "lorax_request_classify_output_count", text)
        self.steps = StepMetrics(_DURATIONS)
        # Ours.
        self.time_to_first_token = _own(_DURATIONS, "time_to_first_token_seconds", "Seconds to the first token")
        self.inter_token_latency = _own(_LATENCIES, "inter_token_latency_seconds", "Seconds between a request's tokens")
        self.queue_seconds = _own(_DURATIONS, "queue_seconds", "Seconds in the router's queue")
        self.batch_size = _own(_BATCH_SIZES, "dispatch_batch_size", "Requests per message to a shard")
        self.prompt_tokens = _counter("prompt_tokens", "Prompt tokens sent to shards")
        self.generated_tokens = _counter("generated_tokens", "Tokens received from shards")
        self.cached_prompt_tokens = _counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache")
        self.prefix_hits = _counter("prefix_hits", "Requests with a part of their prompt in the prefix cache")
        self.preemptions = _counter("preemptions", "Requests preempted because KV pages ran out")
        self.device_idle_seconds = _counter("device_idle_seconds", "Seconds that devices were idle between steps")
        self.drafted_tokens = _counter("drafted_tokens", "Draft tokens verified")
        self.accepted_tokens = _counter("accepted_tokens", "Draft tokens accepted")
        self.aborts = _counter("aborts", "Requests ended by the router: cancelled, or complete at a stop string")
        self.shard_messages = _counter("shard_messages", "Messages received from shards, heartbeats excluded")
        self.shard_reconnects = _counter("shard_reconnects", "Streams lost")
        self.requests_retried = _counter("requests_retried", "Requests whose shard was lost or rejected them, retried")
        text = "Requests queued again because another caller had a right to their place in a shard"
        self.requests_taken_back = _counter("requests_taken_back", text, CALLER_LABEL)
        self.requests_held = _counter("requests_held", "Requests taken back until their clients read what has come")
        text = "Prompt tokens sent to shards and tokens received, by API key; those without a key are `addresses`"
        self.caller_tokens = _counter("caller_tokens", text, CALLER_LABEL)
        self.routing_decisions = _counter("routing_decisions", "Requests sent, by the reason for their shard", "reason")
        self.usage_dropped = _counter("usage_dropped", "Usage records that could not be written or posted", "to")
        text = "Requests and connections rejected before any route, by reason"
        self.connections_rejected = _counter("connections_rejected", text, "reason")
        self.adapters = AdapterMetrics()
        self.speculation, self.learning = SpeculationMetrics(), LearningMetrics()
        self.vllm = vllm
        self.gauges = dict.fromkeys(_GAUGES, 0.0)
        """By full name."""
        self._page_size = 0
        self._num_pages: dict[int, int] = {}
        self._loads: dict[int, pb.Load] = {}
        """The last Load of each shard."""

    @classmethod
    def configured(cls, config: RouterConfig) -> Self:
        """The metrics that `--metrics-prefix` asks for."""
        flags = (config.effective_configuration or {}).get("flags", {})
        max_adapters = 0 if config.loader_address is None else flags.get("max-active-adapters") or 0
        is_vllm = PREFIX in config.metrics_prefix
        vllm = VllmMetrics(config.model_name, config.max_total_tokens, max_adapters) if is_vllm else None
        return cls(config.max_input_length, config.max_total_tokens, vllm)

    def caller_worked(self, caller: str, num_tokens: int) -> None:
        """Tokens that the shares of callers count."""
        self.caller_tokens.add(num_tokens, caller_label(caller))

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

    def connection_rejected(self, reason: str) -> None:
        """Answered before any route: its head is too large, too slow or no HTTP, or the address has too many."""
        self.connections_rejected.add(1, reason)

    def request_validated(self, seconds: float) -> None:
        self.request_validation_duration.observe(seconds)

    # What the dispatcher reports

    def set_info(self, info: pb.ShardInfo, index: int = 0) -> None:
        """Shard `index` is connected."""
        self._page_size = info.page_size
        self._num_pages[index] = info.num_pages
        self.gauges["lorikeet_kv_pages"] = sum(self._num_pages.values())
        if self.vllm is not None:
            self.vllm.set_cache(info)

    def record_output(self, output: pb.StepOutput, num_tokens: int, index: int = 0) -> None:
        """One message of shard `index`, with `num_tokens` tokens in it."""
        if output.outputs or output.columns or output.adapters:
            self.shard_messages.add()
        self.generated_tokens.add(num_tokens)
        num_steps = self.steps.observe(output, num_tokens, index)
        if output.HasField("learning"):
            self.learning.observe(output.learning, index)
        if not output.HasField("load"):
            return
        load = output.load
        before = self._loads.get(index)
        self._loads[index] = load
        if before is not None and load.gap_us > before.gap_us:
            self.device_idle_seconds.add((load.gap_us - before.gap_us) / 1e6)
        if load.num_preempted:
            self.preemptions.add(load.num_preempted)
        if self.vllm is not None and num_steps:
            self.vllm.iteration_tokens.observe(load.step_tokens, num_steps)

    def request_sent(self, waited_seconds: float, num_prompt: int) -> None:
        """A request left the queue."""
        self.queue_seconds.observe(waited_seconds)
        self.request_queue_duration.observe(waited_seconds)
        self.prompt_tokens.add(num_prompt)

    def batch_left(self, num_requests: int, num_running: int = 0) -> None:
        """A message with `num_requests` was sent to a shard that runs `num_running` others."""
        self.batch_size.observe(num_requests)
        self.batch_next_size.observe(num_requests)
        if num_running:
            self.steps.concatenated.add(1, "backpressure")

    def first_token(self, seconds: float, num_cached: int) -> None:
        """`num_cached` tokens of the prompt were found in the prefix cache."""
        self.time_to_first_token.observe(seconds)
        self.steps.has_ended_prompt = True
        if self.vllm is not None:
            self.vllm.time_to_first_token.observe(seconds)
        if num_cached:
            self.prefix_hits.add()
            self.cached_prompt_tokens.add(num_cached)

    def tokens_arrived(self, seconds: float, num_tokens: int, num_requests: int = 1) -> None:
        """Further tokens of a request, or of each of several, `seconds` after its last ones."""
        self.inter_token_latency.observe(seconds / num_tokens, num_tokens * num_requests)
        if self.vllm is not None:
            self.vllm.inter_token_latency.observe(seconds / num_tokens, num_tokens * num_requests)

    def speculation_stats(self, output: ShardOutput, num_kept: int, adapter: Adapter | None, digest: str) -> None:
        """An output with draft tokens; its first `num_kept` tokens are in the text."""
        self.drafted_tokens.add(sum(output.num_drafted))
        self.accepted_tokens.add(num_emitted(output, num_kept))
        label = BASE if adapter is None else self.adapters.label(adapter, digest)
        self.speculation.observe(output, num_kept, label)

    def generation_ended(self, generation: Generation, seconds: float) -> None:
        """A request with output is over, `seconds` after it was sent."""
        self.request_inference_duration.observe(seconds)
        self.request_mean_time_per_token_duration.observe(seconds / generation.num_generated)
        self.request_generated_tokens.observe(generation.num_generated)
        self.request_skipped_tokens.observe(generation.num_skipped)
        self.request_input_length.observe(len(generation.request.prompt_ids))
        self.request_max_new_tokens.observe(generation.request.max_new_tokens)
        if self.vllm is not None:
            self.vllm.ended(generation, seconds)

    def pooled_ended(self, generation: Generation, seconds: float) -> None:
        """A vector or scores were computed, `seconds` after the request was sent."""
        self.request_inference_duration.observe(seconds)
        self.request_input_length.observe(len(generation.request.prompt_ids))

    def generation_lost(self, reason: str) -> None:
        """A request is over without its whole text: `abort` where its client has gone, else `error`."""
        if self.vllm is not None:
            self.vllm.request_success.add(1, reason)

    def shard_gone(self, index: int) -> None:
        """Nothing runs there any more."""
        self._loads.pop(index, None)
        self.steps.forget(index)
        self.learning.forget(index)
        self._num_pages.pop(index, None)
        self.gauges["lorikeet_kv_pages"] = sum(self._num_pages.values())

    # Output

    def prometheus(self, may_name: MayName = everything) -> bytes:
        """The text format; prometheus_client's own writer would add `_total` to LoRAX's counter names."""
        lines = []
        for family in self._shown(may_name):
            lines.append(f"# HELP {family.name} {family.documentation}\n# TYPE {family.name} {family.type}\n")
            for sample in family.samples:
                lines.append(f"{sample.name}{_labels(sample.labels)} {floatToGoString(sample.value)}\n")
        return "".join(lines).encode()

    def lorax_json(self, may_name: MayName = everything) -> bytes:
        """`{name: {"type", "data": [{"key", "value"}]}}`; keys are sum, count, `name{labels}` or empty."""
        result: dict[str, Any] = {}
        for family in self._shown(may_name):
            data = [
                {"key": _json_key(family.name, sample.name, sample.labels), "value": sample.value}
                for sample in family.samples
            ]
            result[family.name] = {"type": family.type, "data": data}
        return orjson.dumps(result)

    def render(self, accept: str, may_name: MayName = everything) -> tuple[bytes, str]:
        """Body and content type by the request's Accept header: JSON when requested, else Prometheus text.

        `may_name`: whether an alias may be named; the numbers of all others are those of `other`.
        """
        if "application/json" in accept:
            return self.lorax_json(may_name), "application/json"
        return self.prometheus(may_name), PROMETHEUS_TYPE

    def _shown(self, may_name: MayName) -> Iterator[Metric]:
        if may_name is everything:
            return self.collect()
        return (without_names(family, self._may_show(may_name)) for family in self.collect())

    def _may_show(self, may_name: MayName) -> MayName:
        """Digests and the labels of no adapter are not names."""
        return lambda label: label in (BASE, OTHER, "") or self.adapters.is_digest(label) or may_name(label)

    def collect(self) -> Iterator[Metric]:
        """Prometheus families of all metrics, and those with former names again."""
        for family in self._current():
            yield family
            if family.name in FORMER_NAMES:
                yield _as_former(family)

    def _current(self) -> Iterator[Metric]:
        yield from families(self)
        yield from self.steps.collect()
        yield from self.adapters.collect()
        yield from self.speculation.collect()
        yield from self.learning.collect()
        self._sum_loads()
        for name, value in self.gauges.items():
            yield GaugeMetricFamily(name, _GAUGES.get(name, name), value=value)
        if self.vllm is not None:
            yield from self._vllm_families(self.vllm)

    def _vllm_families(self, vllm: VllmMetrics) -> Iterator[Metric]:
        """vLLM's names, of which gauges and counters have the same numbers as ours."""
        gauges = self.gauges
        pages, used = gauges.get("lorikeet_kv_pages", 0), gauges.get("lorikeet_kv_pages_used", 0)
        waiting = gauges.get("lorax_queue_length", 0) + gauges.get("lorikeet_shard_waiting_requests", 0)
        current = {
            "num_requests_running": gauges.get("lorikeet_running_requests", 0),
            "num_requests_waiting": waiting,
            "kv_cache_usage_perc": used / pages if pages else 0.0,
        }
        totals = {
            "num_preemptions": self.preemptions,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generated_tokens,
            "prefix_cache_queries": self.prompt_tokens,
            "prefix_cache_hits": self.cached_prompt_tokens,
            "spec_decode_num_draft_tokens": self.drafted_tokens,
            "spec_decode_num_accepted_tokens": self.accepted_tokens,
        }
        yield from vllm.collect(current, {name: counter.values.get("", 0) for name, counter in totals.items()})
        yield from vllm.collect_drafts(self.speculation)
        yield from vllm.collect_adapters(self.adapters.by_label)

    def _sum_loads(self) -> None:
        """Set the gauges that cover all shards."""
        loads, gauges = self._loads.values(), self.gauges
        used = sum(load.used_pages for load in loads)
        gauges["lorikeet_running_requests"] = sum(load.num_running for load in loads)
        gauges["lorax_batch_current_size"] = gauges["lorikeet_running_requests"]
        gauges["lorax_batch_current_max_tokens"] = used * self._page_size
        gauges["lorikeet_shard_waiting_requests"] = sum(load.num_waiting for load in loads)
        gauges["lorikeet_kv_pages_used"] = used
        gauges["lorikeet_kv_pages_cached"] = sum(load.cached_pages for load in loads)


def _as_former(family: Metric) -> Metric:
    """The same numbers under the family's former name."""
    name = FORMER_NAMES[family.name]
    former = Metric(name, f"Deprecated: {family.name} has the same numbers", family.type)
    for sample in family.samples:
        labels = {key: _FORMER_REASONS.get(value, value) for key, value in sample.labels.items()}
        former.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
    return former


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _json_key(family: str, sample: str, labels: dict[str, str]) -> str:
    suffix = sample.removeprefix(family).lstrip("_")
    if suffix in ("sum", "count") and not labels:
        return suffix
    return f"{sample}{_labels(labels)}" if labels else ""
