"""What operators see of adapters: requests, tokens and errors of each, loads by tier, what is where.

The number of labels is bounded: the operator's aliases by name, others by the beginning of their digest, and all that
come after the bound as `other`.
"""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from lorikeet.router.metrics.histogram import Counter, Histogram
from lorikeet.router.requests.adapter_ref import Adapter

MOST_LABELS = 256
OTHER = "other"
_SECONDS = [0.01 * 2**power for power in range(16)]
_COUNTERS = {
    "requests": "Requests that were sent to a shard, by adapter",
    "prompt_tokens": "Prompt tokens of an adapter's requests",
    "generated_tokens": "Tokens that an adapter's requests received",
    "errors": "Requests that failed because of their adapter",
}
_GAUGES = {
    "resident": "Adapters in slots",
    "known": "Adapters whose content the router knows",
    "loading": "Adapters on their way from a source or the disk",
    "pinned": "Adapters that stay",
}


class AdapterMetrics:
    """Of one router. Observing is an addition or two."""

    def __init__(self) -> None:
        self.requests = Counter()
        self.prompt_tokens = Counter()
        self.generated_tokens = Counter()
        self.errors = Counter()
        self.hits = Counter()
        """Requests by where their adapter was when they left: in a slot, or elsewhere."""
        self.loads = Counter()
        self.load_seconds: dict[str, Histogram] = {}
        self.evictions = Counter()
        self.gauges = dict.fromkeys(_GAUGES, 0)
        self._labels: set[str] = set()

    def sent(self, adapter: Adapter, digest: str, num_prompt: int, was_resident: bool) -> None:
        """A request left for a shard."""
        label = self.label(adapter, digest)
        self.requests.add(1, label)
        self.prompt_tokens.add(num_prompt, label)
        self.hits.add(1, "slot" if was_resident else "elsewhere")

    def received(self, adapter: Adapter, digest: str, num_tokens: int) -> None:
        self.generated_tokens.add(num_tokens, self.label(adapter, digest))

    def failed(self, adapter: Adapter, digest: str) -> None:
        self.errors.add(1, self.label(adapter, digest))

    def loaded(self, tier: str, seconds: float) -> None:
        """The loader brought one."""
        self.loads.add(1, tier)
        histogram = self.load_seconds.get(tier)
        if histogram is None:
            histogram = self.load_seconds[tier] = Histogram(_SECONDS)
        histogram.observe(seconds)

    def label(self, adapter: Adapter, digest: str) -> str:
        """What an adapter is called in metrics."""
        label = adapter.alias or digest[:12] or OTHER
        if label not in self._labels:
            if len(self._labels) >= MOST_LABELS:
                return OTHER
            self._labels.add(label)
        return label

    def collect(self) -> Iterator[Metric]:
        """Prometheus families; nothing at all until there was an adapter."""
        if not (self.requests.values or self.errors.values or self.loads.values):
            return
        for name, text in _COUNTERS.items():
            yield labelled(f"lorikeet_adapter_{name}_total", text, getattr(self, name), "adapter")
        yield labelled("lorikeet_adapter_hits_total", "Requests by where their adapter was", self.hits, "tier")
        yield labelled("lorikeet_adapter_loads_total", "Adapters that the loader brought", self.loads, "tier")
        yield labelled("lorikeet_adapter_evictions_total", "Adapters that left a tier", self.evictions, "tier")
        seconds = HistogramMetricFamily("lorikeet_adapter_load_seconds", "Seconds per load", labels=["tier"])
        for tier, histogram in self.load_seconds.items():
            seconds.add_metric([tier], buckets=histogram.buckets(), sum_value=histogram.sum)
        yield seconds
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"lorikeet_adapters_{name}", text, value=self.gauges[name])


def labelled(name: str, text: str, counter: Counter, label: str) -> Metric:
    """A family of one label whose name keeps its `_total`."""
    family = Metric(name, text, "counter")
    family.name = name
    for value, number in counter.values.items():
        family.add_sample(name, {label: value}, number)
    return family
