"""Metrics of speculative decoding: draft tokens, steps and seconds by method and adapter.

Bounded: a method is a draft source, and adapters have the labels of the adapter metrics.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.router.metrics.histogram import counter_family
from lorikeet.router.requests.generation import is_verified, num_emitted

PHASES = ("draft", "verify", "accept")
BASE = "__base_model__"
"""The label of requests without an adapter."""
_FAMILIES = {
    "drafted_tokens": "Draft tokens verified, by method",
    "accepted_tokens": "Draft tokens accepted into texts, by method",
    "steps": "Steps that verified draft tokens",
}


class SpeculationMetrics:
    """Speculation metrics of one router. Observing is a few additions per message with draft tokens."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, str], float]] = {name: {} for name in (*_FAMILIES, *PHASES)}
        """By family or phase, then by method and adapter."""
        self.accepted_at: dict[tuple[str, str, int], int] = {}
        """By method, adapter and position in the step, from 0: of Medusa heads, the index of the head."""

    def observe(self, output: pb.RequestOutput, num_kept: int, adapter: str) -> None:
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


def num_verified(output: pb.RequestOutput) -> int:
    """How many of an output's steps verified draft tokens: those that end with one, or with the token after one.

    At least one for an output with draft tokens: a step may also end with the first output token.
    """
    steps = zip(output.sources, output.step_ends, strict=False)
    return max(1, sum(bool(is_last) and is_verified(source) for source, is_last in steps))
