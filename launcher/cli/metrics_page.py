"""A page of Prometheus metrics, and what has changed between two of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Page:
    """The samples of one moment."""

    at: float
    """time.monotonic()."""
    samples: dict[str, dict[Labels, float]]
    """By name, then by labels in the order of their names."""

    @classmethod
    def read(cls, text: str, time_s: float) -> "Page":
        """The page with this text. Raises ValueError if it is not in Prometheus's format."""
        samples: dict[str, dict[Labels, float]] = {}
        written = {line.partition(" ")[0].partition("{")[0] for line in text.splitlines()}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:  # the library adds `_total` to the names of counters
                name = sample.name if sample.name in written else sample.name.removesuffix("_total")
                samples.setdefault(name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return cls(time_s, samples)

    def total(self, name: str) -> float:
        """Sum of a metric over all labels; 0 for a metric that is not there."""
        return sum(self.samples.get(name, {}).values())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, {}).items():
            key = dict(labels).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums


@dataclass(frozen=True)
class Interval:
    """From one page to a later one. A counter that has fallen was reset: its server is new."""

    first: Page
    last: Page

    @property
    def seconds(self) -> float:
        return max(self.last.at - self.first.at, 1e-9)

    def rate(self, name: str) -> float:
        """Increase of a counter per second."""
        return _grown(self.first.total(name), self.last.total(name)) / self.seconds

    def rates(self, name: str, label: str) -> dict[str, float]:
        """Increase of a counter per second, by the value of one label; only what has grown."""
        first = self.first.by(name, label)
        grown = {key: _grown(first.get(key, 0.0), value) for key, value in self.last.by(name, label).items()}
        return {key: value / self.seconds for key, value in grown.items() if value > 0}

    def quantile(self, share: float, histogram: str) -> float | None:
        """Quantile of the histogram's samples between the pages, interpolated in its bucket; None without samples."""
        buckets = list(self._buckets(histogram))
        if not buckets or not buckets[-1][1]:
            return None
        rank = share * buckets[-1][1]
        low, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= rank:
                if bound == float("inf"):
                    return low
                return low + (bound - low) * (rank - below) / max(count - below, 1e-9)
            low, below = bound, count
        return low

    def _buckets(self, histogram: str) -> Iterator[tuple[float, float]]:
        """(upper bound, observations up to it) in the order of bounds."""
        first, last = (page.by(f"{histogram}_bucket", "le") for page in (self.first, self.last))
        for bound in sorted(last, key=float):
            yield float(bound), _grown(first.get(bound, 0.0), last[bound])


def _grown(first: float, last: float) -> float:
    return last - first if last >= first else last
