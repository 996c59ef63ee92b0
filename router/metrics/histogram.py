"""Counters and histograms that are cheap enough for every token: observing is a bisection and two additions.

The client library's own walk the bounds one by one under a lock.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric, SummaryMetricFamily


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

    def family(self) -> Metric:
        if not self._label:
            return counter_family(self.name, self.text, [({}, self.values.get("", 0))])
        labelled = [({self._label: value}, number) for value, number in self.values.items()]
        return counter_family(self.name, self.text, labelled)


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
