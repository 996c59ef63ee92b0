"""What operators see of guessing ahead: guesses, steps and seconds by what guessed and for which adapter.

Bounded: the methods are three, and adapters go by the labels of `adapter_metrics`.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.requests.speculation_stats import num_emitted
from lorikeet.router.requests.types import ACCEPTED, Source

METHODS = ("lookup", "medusa", "draft")
"""In the order in which the wire counts drafts."""
PHASES = ("draft", "verify", "accept")
BASE = "__base_model__"
"""The label of requests without an adapter."""
_SOURCES = (Source.LOOKUP, Source.MEDUSA, Source.DRAFT)
_OWN = frozenset({Source.RESAMPLE, Source.BONUS})
_FAMILIES = {
    "drafted_tokens": "Tokens guessed and verified, by what guessed them",
    "accepted_tokens": "Of them, those in texts",
    "steps": "Steps that verified guesses",
}


class SpeculationMetrics:
    """Of one router. Observing is a few additions per message that tells of guesses."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, str], float]] = {name: {} for name in (*_FAMILIES, *PHASES)}
        """By family or phase, then by method and adapter."""
        self.accepted_at: dict[tuple[str, str, int], int] = {}
        """By method, adapter and place in the step, from 0: of heads, which one guessed it."""

    def observe(self, output: pb.RequestOutput, num_kept: int, adapter: str) -> None:
        """A message that tells of drafts, of whose tokens the first `num_kept` are in the text.

        Its steps and seconds are those of the one method that guessed. Where messages of several steps tell of several
        methods, they are shared out by the guesses of each.
        """
        num_drafted = sum(output.num_drafted)
        kept = output.sources[:num_kept]
        num_accepted, num_steps = num_emitted(output, num_kept), num_verified(output)
        seconds = (output.draft_seconds, output.verify_seconds, output.accept_seconds)
        for method, source, drafted in zip(METHODS, _SOURCES, output.num_drafted, strict=False):
            if not drafted:
                continue
            key, is_isolated = (method, adapter), drafted == num_drafted
            share = drafted / num_drafted
            self._add("drafted_tokens", key, drafted)
            self._add("accepted_tokens", key, num_accepted if is_isolated else kept.count(source))
            self._add("steps", key, num_steps * share)
            for phase, spent in zip(PHASES, seconds, strict=True):
                self._add(phase, key, spent * share)
        for guess, place in accepted_places(kept, output.step_ends):
            at = (METHODS[_SOURCES.index(guess)], adapter, place)
            self.accepted_at[at] = self.accepted_at.get(at, 0) + 1

    def _add(self, family: str, key: tuple[str, str], amount: float) -> None:
        values = self.values[family]
        values[key] = values.get(key, 0.0) + amount

    def collect(self) -> Iterator[Metric]:
        """Prometheus families; nothing at all until something was guessed."""
        if not self.values["drafted_tokens"]:
            return
        for name, text in _FAMILIES.items():
            family = _family(f"lorikeet_speculation_{name}_total", text)
            for (method, adapter), number in self.values[name].items():
                family.add_sample(family.name, {"method": method, "adapter": adapter}, number)
            yield family
        family = _family("lorikeet_speculation_accepted_tokens_per_position_total", "Accepted, by place in the step")
        for (method, adapter, place), number in self.accepted_at.items():
            family.add_sample(family.name, {"method": method, "adapter": adapter, "position": str(place)}, number)
        yield family
        family = _family("lorikeet_speculation_seconds_total", "Seconds of steps that verified guesses, by phase")
        for phase in PHASES:
            for (method, adapter), number in self.values[phase].items():
                family.add_sample(family.name, {"method": method, "adapter": adapter, "phase": phase}, number)
        yield family


def accepted_places(sources: Iterable[int], ends: bytes) -> Iterator[tuple[Source, int]]:
    """Each accepted guess of a message: its Source, and how many guesses of its step are before it."""
    place = 0
    for source, is_last in zip(sources, ends, strict=False):
        if source in ACCEPTED:
            yield Source(source), place
        place = 0 if is_last else place + 1


def num_verified(output: pb.RequestOutput) -> int:
    """How many of a message's steps verified guesses: all that end with a guess, or behind one.

    At least one, where the message tells of guesses: a step may also end with the first token of all.
    """
    ends = output.step_ends
    found = sum(
        bool(ends[index]) and (source in _OWN or source in ACCEPTED)
        for index, source in enumerate(output.sources[: len(ends)])
    )
    return max(1, found)


def _family(name: str, text: str) -> Metric:
    """A counter whose name keeps its `_total`."""
    family = Metric(name, text, "counter")
    family.name = name
    return family
