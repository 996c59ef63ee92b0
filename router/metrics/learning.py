"""Metrics of Medusa heads learned from traffic, as shards report them: totals since each shard's start."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.metrics.histogram import counter_family

_DECISIONS = ("adopted", "rejected", "reverted", "failed")
_COUNTERS = {
    "learning_rows": ("num_rows", "Output tokens collected to learn heads from"),
    "learning_training_seconds": ("train_seconds", "Seconds of trainings"),
    "learning_cpu_seconds": ("cpu_seconds", "Processor seconds of trainings, which run where a processor is idle"),
}


class LearningMetrics:
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
                f"lorikeet_{name}_total", text, [({}, sum(getattr(each, field) for each in everything))]
            )
        decisions = [({"decision": each}, sum(getattr(t, f"num_{each}") for t in everything)) for each in _DECISIONS]
        yield counter_family("lorikeet_learning_decisions_total", "Trained heads, by what became of them", decisions)
        ring_bytes = sum(each.ring_bytes for each in everything)
        yield GaugeMetricFamily("lorikeet_learning_ring_bytes", "Memory of the collected rows", value=ring_bytes)
