"""Metrics under vLLM's names, with its types, labels and buckets, for dashboards and routers that read those.

The whole server is one engine, number 0. Exported in addition to LoRAX's names with `--metrics-prefix vllm`.
"""

import time
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.metrics.groups import (
    AdapterLoad,
    Counter,
    Histogram,
    MetricGroup,
    SpeculationMetrics,
    counter_family,
    families,
)
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import FinishReason

PREFIX = "vllm"
ENGINE = "0"
_FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0, 160.0, 640.0, 2560.0]  # fmt: skip
_PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0]
_REQUEST = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0]  # fmt: skip
_STEP_TOKENS = [1, *(2**power for power in range(3, 15))]
_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS_TOKEN: "stop", FinishReason.STOP_SEQUENCE: "stop"}
_GAUGES = {
    "num_requests_running": "Requests running in shards",
    "num_requests_waiting": "Requests waiting, in the router or in a shard",
    "kv_cache_usage_perc": "Share of the KV cache that requests use; 1 is all of it",
}
_TOTALS = {
    "num_preemptions": "Requests preempted because KV pages ran out",
    "prompt_tokens": "Prompt tokens sent to shards",
    "generation_tokens": "Tokens received from shards",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "spec_decode_num_draft_tokens": "Draft tokens verified",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted",
}


def _lengths(top: int) -> list[float]:
    """1, 2, 5, 10, 20, … up to `top`."""
    return [value for power in range(10) for value in (10**power, 2 * 10**power, 5 * 10**power) if value <= top]


class VllmMetrics(MetricGroup):
    """Metrics of one router that vLLM counts in buckets of its own. The rest is computed from our metrics."""

    def __init__(self, model_name: str, max_total_tokens: int, max_adapters: int) -> None:
        """`max_adapters`: the number of adapter slots of a shard."""

        def histogram(name: str, text: str, bounds: list[float]) -> Histogram:
            return Histogram(bounds, f"{PREFIX}:{name}", text)

        lengths = _lengths(max_total_tokens)
        self.time_to_first_token = histogram("time_to_first_token_seconds", "To the first token", _FIRST_TOKEN)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between tokens of a request", _PER_TOKEN)
        text = "Per output token after the first, of a request"
        self.time_per_token = histogram("request_time_per_output_token_seconds", text, _PER_TOKEN)
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to the end", _REQUEST)
        self.queue_time = histogram("request_queue_time_seconds", "In the queue", _REQUEST)
        self.inference_time = histogram("request_inference_time_seconds", "In a shard", _REQUEST)
        self.prefill_time = histogram("request_prefill_time_seconds", "In a shard up to the first token", _REQUEST)
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the last", _REQUEST)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens per request", lengths)
        self.generation_tokens = histogram("request_generation_tokens", "Output tokens per request", lengths)
        self.max_tokens = histogram("request_params_max_tokens", "Output tokens asked for", lengths)
        self.max_generation_tokens = histogram("request_max_num_generation_tokens", "Output tokens asked for", lengths)
        self.iteration_tokens = histogram("iteration_tokens_total", "Tokens per step", list(_STEP_TOKENS))
        text = "Requests that are over, by reason"
        self.request_success = Counter(f"{PREFIX}:request_success_total", text, "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self.request_success.add(0, reason)
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._max_adapters = max_adapters
        self._cache: dict[str, str] = {}

    def set_cache(self, info: pb.ShardInfo) -> None:
        """A shard is connected."""
        self._cache = {
            "block_size": str(info.page_size),
            "cache_dtype": info.kv_cache_dtype or "auto",
            "enable_prefix_caching": str(info.prefix_caching),
            "num_gpu_blocks": str(info.num_pages),
        }

    def ended(self, generation: Generation, seconds: float) -> None:
        """A request with output is over, `seconds` after it was sent."""
        num_tokens, waited = generation.num_generated, generation.routing.waited_s or 0.0
        self.latency.observe(waited + seconds)
        self.queue_time.observe(waited)
        self.inference_time.observe(seconds)
        first, last = generation.first_token_at, generation.last_token_at
        if first is not None and last is not None and generation.routing.sent_at is not None:
            self.prefill_time.observe(first - generation.routing.sent_at)
            self.decode_time.observe(last - first)
            if num_tokens > 1:
                self.time_per_token.observe((last - first) / (num_tokens - 1))
        self.prompt_tokens.observe(len(generation.request.prompt_ids))
        self.generation_tokens.observe(num_tokens)
        self.max_tokens.observe(generation.request.max_new_tokens)
        self.max_generation_tokens.observe(generation.request.max_new_tokens)
        if generation.finish_reason is not None:
            self.request_success.add(1, _REASONS[generation.finish_reason])

    def collect(self, current: Mapping[str, float], totals: Mapping[str, float]) -> Iterator[Metric]:
        """Prometheus families; `current` and `totals` are by the names in _GAUGES and _TOTALS."""
        for name, text in _GAUGES.items():
            yield self._labelled(GaugeMetricFamily(f"{PREFIX}:{name}", text, value=current[name]))
        for name, text in _TOTALS.items():
            yield counter_family(f"{PREFIX}:{name}_total", text, [(self._labels, totals[name])])
        for family in families(self):
            yield self._labelled(family)
        if self._cache:
            family = Metric(f"{PREFIX}:cache_config_info", "The KV cache of each shard", "gauge")
            family.add_sample(family.name, {**self._cache, "engine": ENGINE}, 1)
            yield family

    def collect_drafts(self, speculation: SpeculationMetrics) -> Iterator[Metric]:
        """Families of speculative decoding."""
        prefix = f"{PREFIX}:spec_decode_num"
        total = sum(speculation.values["steps"].values())
        yield counter_family(f"{prefix}_drafts_total", "Steps that verified draft tokens", [(self._labels, total)])
        by_position: dict[int, int] = {}
        for (_, _, position), number in speculation.accepted_at.items():
            by_position[position] = by_position.get(position, 0) + number
        samples = [({**self._labels, "position": str(at)}, float(by_position[at])) for at in sorted(by_position)]
        yield counter_family(f"{prefix}_accepted_tokens_per_pos_total", "Draft tokens accepted, by position", samples)

    def collect_adapters(self, loads: Mapping[str, AdapterLoad]) -> Iterator[Metric]:
        """The adapters that have requests. As in vLLM the value is the time, so that the latest series is largest."""
        if not self._max_adapters:
            return
        labels = {
            "max_lora": str(self._max_adapters),
            "waiting_lora_adapters": ",".join(name for name, load in loads.items() if load.waiting_requests),
            "running_lora_adapters": ",".join(name for name, load in loads.items() if load.running_requests),
        }
        family = Metric(f"{PREFIX}:lora_requests_info", "Adapters with requests, and when this was so", "gauge")
        family.add_sample(family.name, labels, time.time())
        yield family

    def _labelled(self, family: Metric) -> Metric:
        """With the labels that all of vLLM's metrics have."""
        copy = Metric(family.name, family.documentation, family.type)
        copy.name = family.name
        for sample in family.samples:
            copy.add_sample(sample.name, {**self._labels, **sample.labels}, sample.value)
        return copy
