"""Counters and histograms, and the metrics of adapters and of speculative decoding.

Every alias of the operator has a label. Other adapters have the beginning of their digest, up to a bounded number of
them, and `other` beyond it.

Counters and histograms are cheap enough for every token: observing is a bisection and two additions. Those of the
client library walk the bounds one by one under a lock.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily

from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.router.requests.generation import is_verified, num_emitted
from lorikeet.router.requests.request import Adapter, ShardOutput


class Histogram:
    """Counts per bucket; without bounds only number and sum (a summary)."""

    __slots__ = ("_bounds", "_counts", "name", "sum", "text")

    def __init__(self, bounds: Sequence[float], name: str = "", text: str = "") -> None:
        self.name, self.text = name, text
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> Self:
        kept = copy(self)
        kept._counts = self._counts.copy()
        return kept

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        total, result = 0, []
        for bound, count in zip([*(f"{bound:.6g}" for bound in self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            result.append((bound, float(total)))
        return result

    def family(self) -> Metric:
        if not self._bounds:
            return SummaryMetricFamily(self.name, self.text, count_value=self.count, sum_value=self.sum)
        return HistogramMetricFamily(self.name, self.text, buckets=self.buckets(), sum_value=self.sum)


class Counter:
    """Numbers by the value of one label ("": no label)."""

    __slots__ = ("_label", "name", "text", "values")

    def __init__(self, name: str = "", text: str = "", label: str = "") -> None:
        self.name, self.text = name, text
        self._label = label
        self.values: dict[str, float] = {}

    def add(self, amount: float = 1, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0) + amount

    def snapshot(self) -> Self:
        kept = copy(self)
        kept.values = self.values.copy()
        return kept

    def family(self) -> Metric:
        if not self._label:
            return counter_family(self.name, self.text, [({}, self.values.get("", 0))])
        labelled = [({self._label: value}, number) for value, number in self.values.items()]
        return counter_family(self.name, self.text, labelled)


class MetricGroup:
    """An object of counters and histograms."""

    def snapshot(self) -> Self:
        """A copy whose numbers stay as they are now, for a thread that writes them."""
        kept = copy(self)
        for name, value in vars(self).items():
            setattr(kept, name, _snapshot(value))
        return kept


def _snapshot(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _snapshot(each) for key, each in value.items()}
    return value.snapshot() if isinstance(value, Counter | Histogram | MetricGroup) else value


def families(owner: object) -> Iterator[Metric]:
    """Families of all counters and histograms among an object's attributes."""
    for metric in vars(owner).values():
        if isinstance(metric, Counter | Histogram):
            yield metric.family()


def histogram_family(name: str, text: str, label: str, histograms: Mapping[str, Histogram]) -> Metric:
    """One family of several histograms, by the value of a label."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, histogram in histograms.items():
        family.add_metric([value], buckets=histogram.buckets(), sum_value=histogram.sum)
    return family


def counter_family(name: str, text: str, samples: Iterable[tuple[dict[str, str], float]]) -> Metric:
    """A counter of exactly this name: the client library removes and adds a final `_total`."""
    family = Metric(name, text, "counter")
    family.name = name
    for labels, number in samples:
        family.add_sample(name, labels, number)
    return family


MAX_LABELS = 256
"""Maximum labels for adapters without an alias."""
OTHER = "other"
_SECONDS = [0.01 * 2**power for power in range(16)]
_GAUGES = {
    "resident": "Adapters in slots",
    "known": "Adapters whose content the router knows",
    "loading": "Adapters that are being loaded from a source or the disk",
    "pinned": "Adapters that are never evicted",
}
_LOADS = {
    "running_requests": "Requests that run, by adapter",
    "waiting_requests": "Requests that wait, by adapter",
    "resident": "Shards that have the adapter in a slot",
}


MayName = Callable[[str], bool]
"""Whether a label of an adapter may be shown to a caller."""
_ADAPTER_LABEL = "adapter"
CALLER_LABEL, ADDRESSES = "caller", "addresses"
"""The label of an API key's name, and its value for callers without a key."""
_ADAPTER_LISTS = ("waiting_lora_adapters", "running_lora_adapters")
"""vLLM's labels, which list adapters."""


def caller_label(identity: str) -> str:
    """The label of a caller by its identity. Addresses have one label."""
    return identity.removeprefix("key:") or ADDRESSES if identity.startswith("key:") else ADDRESSES


def everything(label: str) -> bool:
    """For callers who may see all adapters."""
    return True


def without_names(family: Metric, may_show: MayName) -> Metric:
    """The family with OTHER in place of the names that may not be shown, and of keys."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        labels = dict(sample.labels)
        if not may_show(labels.get(_ADAPTER_LABEL, "")):
            labels[_ADAPTER_LABEL] = OTHER
        if labels.get(CALLER_LABEL, ADDRESSES) != ADDRESSES:
            labels[CALLER_LABEL] = OTHER
        for name in _ADAPTER_LISTS:
            if name in labels:
                shown = (name if may_show(name) else OTHER for name in labels[name].split(","))
                labels[name] = ",".join(dict.fromkeys(shown))
        key = (sample.name, tuple(labels.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    copy = Metric(family.name, family.documentation, family.type)
    copy.name = family.name
    for (name, pairs), value in sums.items():
        copy.add_sample(name, dict(pairs), value)
    return copy


@dataclass
class AdapterLoad:
    """What an adapter does now."""

    running_requests: int = 0
    waiting_requests: int = 0
    resident: int = 0
    """Shards that have it in a slot."""


class AdapterMetrics(MetricGroup):
    """Adapter metrics of one router. Observing is an addition or two."""

    def __init__(self) -> None:
        prefix = "lorikeet_adapter_"
        self.requests = Counter(f"{prefix}requests_total", "Requests sent to a shard, by adapter", "adapter")
        self.prompt_tokens = Counter(f"{prefix}prompt_tokens_total", "Prompt tokens, by adapter", "adapter")
        self.generated_tokens = Counter(f"{prefix}generated_tokens_total", "Output tokens, by adapter", "adapter")
        self.errors = Counter(f"{prefix}errors_total", "Requests that failed because of their adapter", "adapter")
        self.not_activated = Counter(
            f"{prefix}not_activated_total", "Requests without the invocation tokens of their adapter", "adapter"
        )
        self.hits = Counter(f"{prefix}hits_total", "Requests sent, by where their adapter was", "tier")
        self.loads = Counter(f"{prefix}loads_total", "Adapters that the loader has loaded", "tier")
        self.evictions = Counter(f"{prefix}evictions_total", "Adapters that were evicted from a tier", "tier")
        self.load_seconds: dict[str, Histogram] = {}
        self.gauges = dict.fromkeys(_GAUGES, 0)
        self.by_label: Mapping[str, AdapterLoad] = {}
        """Load of every alias, and of other adapters with requests; set before the metrics are exported."""
        self._labels: set[str] = set()

    def sent(self, adapter: Adapter, digest: str, num_prompt: int, tier: str) -> None:
        """A request was sent to a shard; `tier` is where its adapter was: `slot` of it, `host`, `disk` or `source`."""
        label = self.label(adapter, digest)
        self.requests.add(1, label)
        self.prompt_tokens.add(num_prompt, label)
        self.hits.add(1, tier)

    def missed_invocation(self, adapter: Adapter, digest: str) -> None:
        """The base model answers a request, because its prompt does not activate the adapter."""
        self.not_activated.add(1, self.label(adapter, digest))

    def received(self, adapter: Adapter, digest: str, num_tokens: int) -> None:
        self.generated_tokens.add(num_tokens, self.label(adapter, digest))

    def failed(self, adapter: Adapter, digest: str) -> None:
        self.errors.add(1, self.label(adapter, digest))

    def loaded(self, tier: str, seconds: float) -> None:
        """The loader has loaded an adapter."""
        self.loads.add(1, tier)
        self.load_seconds.setdefault(tier, Histogram(_SECONDS)).observe(seconds)

    def label(self, adapter: Adapter, digest: str) -> str:
        """The label of an adapter."""
        if adapter.alias:
            return adapter.alias
        label = digest[:12] or OTHER
        if label not in self._labels:
            if len(self._labels) >= MAX_LABELS:
                return OTHER
            self._labels.add(label)
        return label

    def is_digest(self, label: str) -> bool:
        """Whether it is the label of an adapter without an alias."""
        return label in self._labels

    def collect(self) -> Iterator[Metric]:
        """Prometheus families; none where there is no adapter."""
        if not (self.requests.values or self.errors.values or self.loads.values or self.by_label):
            return
        yield from families(self)
        yield histogram_family("lorikeet_adapter_load_seconds", "Seconds per load", "tier", self.load_seconds)
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"lorikeet_adapters_{name}", text, value=self.gauges[name])
        for name, text in _LOADS.items():
            family = GaugeMetricFamily(f"lorikeet_adapter_{name}", text, labels=["adapter"])
            for label, load in self.by_label.items():
                family.add_metric([label], getattr(load, name))
            yield family


PHASES = ("draft", "verify", "accept")
BASE = "__base_model__"
"""The label of requests without an adapter."""
_FAMILIES = {
    "drafted_tokens": "Draft tokens verified, by method",
    "accepted_tokens": "Draft tokens accepted into texts, by method",
    "steps": "Steps that verified draft tokens",
}


class SpeculationMetrics(MetricGroup):
    """Speculation metrics of one router. Observing is a few additions per message with draft tokens."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, str], float]] = {name: {} for name in (*_FAMILIES, *PHASES)}
        """By family or phase, then by method and adapter."""
        self.accepted_at: dict[tuple[str, str, int], int] = {}
        """By method, adapter and position in the step, from 0: of Medusa heads, the index of the head."""

    def observe(self, output: ShardOutput, num_kept: int, adapter: str) -> None:
        """An output with draft tokens, whose first `num_kept` tokens are in the text.

        Its steps and seconds belong to the one method that was used. If an output of several steps has several methods,
        they are divided in proportion to the draft tokens of each.
        """
        num_drafted = sum(output.num_drafted)
        kept = output.sources[:num_kept]
        num_accepted, num_steps = num_emitted(output, num_kept), num_verified(output)
        seconds = (output.draft_seconds, output.verify_seconds, output.accept_seconds)
        for row, drafted in zip(BY_VALUE.values(), output.num_drafted, strict=False):
            if not drafted:
                continue
            key, is_only = (row.name, adapter), drafted == num_drafted
            share = drafted / num_drafted
            self._add("drafted_tokens", key, drafted)
            self._add("accepted_tokens", key, num_accepted if is_only else kept.count(row.value))
            self._add("steps", key, num_steps * share)
            for phase, spent in zip(PHASES, seconds, strict=True):
                self._add(phase, key, spent * share)
        for method, position in accepted_positions(kept, output.step_ends):
            at = (method, adapter, position)
            self.accepted_at[at] = self.accepted_at.get(at, 0) + 1

    def _add(self, family: str, key: tuple[str, str], amount: float) -> None:
        values = self.values[family]
        values[key] = values.get(key, 0.0) + amount

    def collect(self) -> Iterator[Metric]:
        """Prometheus families; none until a draft token was verified."""
        if not self.values["drafted_tokens"]:
            return
        prefix = "lorikeet_speculation_"
        for name, text in _FAMILIES.items():
            yield counter_family(f"{prefix}{name}_total", text, _samples(self.values[name]))
        text, samples = "Draft tokens accepted, by position in the step", _samples(self.accepted_at, "position")
        yield counter_family(f"{prefix}accepted_tokens_per_position_total", text, samples)
        seconds = {(*key, phase): value for phase in PHASES for key, value in self.values[phase].items()}
        text = "Seconds of steps that verified draft tokens, by phase"
        yield counter_family(f"{prefix}seconds_total", text, _samples(seconds, "phase"))


def _samples(values: Mapping[Any, float], *more: str) -> list[tuple[dict[str, str], float]]:
    """Samples of numbers by method, adapter and `more` labels."""
    names = ("method", "adapter", *more)
    return [(dict(zip(names, map(str, key), strict=True)), value) for key, value in values.items()]


def accepted_positions(sources: Iterable[int], ends: bytes) -> Iterator[tuple[str, int]]:
    """Each accepted draft token of an output: its method, and its position in the step."""
    position = 0
    for source, is_last in zip(sources, ends, strict=False):
        if (row := BY_VALUE.get(source)) is not None:
            yield row.name, position
        position = 0 if is_last else position + 1


def num_verified(output: ShardOutput) -> int:
    """How many of an output's steps verified draft tokens: those that end with one, or with the token after one.

    At least one for an output with draft tokens: a step may also end with the first output token.
    """
    steps = zip(output.sources, output.step_ends, strict=False)
    return max(1, sum(bool(is_last) and is_verified(source) for source, is_last in steps))
