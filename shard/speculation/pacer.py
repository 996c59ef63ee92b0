"""How many of the offered guesses a step verifies, by each request's schedule. Imports no torch, reads no clock.

`constant`: all. `heuristic`: two more after a step whose guesses were all right, else one less (HF transformers'
rule). `auto`: the widths with the most expected tokens per second, from what was learnt of acceptance and of the costs
of steps. Only committed steps teach: a width that depended on its own step's target would bend the law.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shard.request import Request, Schedule, Source
from shard.share import Share
from shard.speculation.acceptance import (
    GROUP_MEMORY,
    PRIOR,
    PRIOR_WEIGHT,
    REQUEST_MEMORY,
    Acceptance,
    chances,
)
from shard.speculation.costs import StepCosts
from shard.speculation.guessers import Guessers, Offer

FIRST_WAIT, LAST_WAIT = 16, 512
"""Steps without a guess after which one is tried again, at first and at most; doubled each time it was wrong."""
LEAST_SECONDS = 1e-6
"""Clocks of host and device may differ, and no step takes nothing."""
LIKELY = 0.3
"""A guess with at least such a chance is kept back by what it costs, not by being wrong."""
HOPELESS, HOPELESS_WAIT = 0.2, 64
"""Where guesses of a draft model were right so rarely, a new request has none for so many steps."""
KEPT_STEPS, WELL_KNOWN = 8, 60
"""A decision holds so many steps while nothing has changed, once its kinds of guesses were seen so often."""

Kind = tuple[str, Source, bool]
"""Guesses that are alike: the adapter that they are for, what guessed them, and whether a long stretch was found."""


@dataclass
class Pace:
    """What a schedule remembers of one request."""

    width: int
    """Of the newest step."""
    num_idle: int = 0
    """Steps since that could have had guesses and had none."""
    look: int = 0
    """So many of these until it is thought over again …"""
    wait: int = FIRST_WAIT
    """… and until one is tried against all expectation."""
    kind: Kind = ("", Source.LOOKUP, False)
    """Of the newest guesses."""
    own: dict[Kind, Acceptance] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """The rest of a step."""

    num_sampled: int
    """Requests that get a token."""
    num_tokens: int
    """Without guesses."""

    @property
    def has_prompts(self) -> bool:
        return self.num_tokens > self.num_sampled


class Pacer:
    """The schedules of all requests of a shard."""

    def __init__(self, guessers: Guessers) -> None:
        self.is_used = False
        """Whether any request goes by what is learnt here."""
        self._guessers = guessers
        self.plain, self.with_heads, self.drafting = StepCosts(), StepCosts(), StepCosts()
        """Of steps without and with heads, and of a draft model's passes by the number of requests."""
        self._groups: dict[Kind, Acceptance] = {}
        self._waits: dict[Kind, int] = {}
        self._decided: tuple[object, int] = (None, 0)

    def wants(self, request: Request) -> bool:
        """Whether the request may have guesses in the next step: else nothing is prepared for any."""
        if request.speculation.schedule is not Schedule.AUTO:
            return True
        self.is_used = True
        pace = request.pace
        if pace is None:
            pace = self._begin(request)
        return pace is None or pace.width > 0 or pace.num_idle + 1 >= pace.look

    def _begin(self, request: Request) -> Pace | None:
        """Let a request wait from the start for which a draft model would take in the prompt in vain."""
        if not self._guessers.takes_draft_model(request):
            return None
        kind = (request.adapter_digest, Source.DRAFT, False)
        group = self._groups.get(kind)
        if group is None or group.first.chance(PRIOR[Source.DRAFT], PRIOR_WEIGHT) > HOPELESS:
            return None
        request.pace = Pace(0, wait=max(HOPELESS_WAIT, self._waits.get(kind, 0)), kind=kind)
        request.pace.look = request.pace.wait
        return request.pace

    def skipped(self, request: Request) -> None:
        """A step passed in which the request was to have none."""
        if request.pace is not None:
            request.pace.num_idle += 1

    def choose(self, offers: Sequence[Offer], load: Load) -> list[int]:
        """How many guesses of each offer to take."""
        widths = [offer.width for offer in offers]
        auto: list[int] = []
        for index, offer in enumerate(offers):
            schedule = offer.request.speculation.schedule
            if schedule is Schedule.CONSTANT:
                continue
            pace = self._pace(offer)
            if schedule is Schedule.HEURISTIC:
                widths[index] = min(offer.width, pace.width)
            else:
                auto.append(index)
        if auto:
            self._choose_auto([offers[index] for index in auto], auto, widths, load)
        return widths

    def verified(self, share: Share, num_accepted: int, was_rejected: bool) -> None:
        """Learn from a committed step with guesses."""
        request, pace = share.request, share.request.pace
        if pace is None:
            return
        if request.speculation.schedule is Schedule.HEURISTIC:
            pace.width = max(1, pace.width - 1) if was_rejected else min(pace.width + 2, _bound(request))
            return
        group = self._groups.setdefault(pace.kind, Acceptance())
        group.observe(num_accepted, was_rejected, GROUP_MEMORY)
        pace.own.setdefault(pace.kind, Acceptance()).observe(num_accepted, was_rejected, REQUEST_MEMORY)
        if num_accepted:
            self._waits[pace.kind] = pace.wait = FIRST_WAIT

    def observe(self, shares: Sequence[Share], seconds: float, draft_seconds: float) -> None:
        """Learn from a committed step: all of it took `seconds`, of them the draft model `draft_seconds`."""
        num_tokens = sum(share.num_tokens for share in shares)
        costs = self.with_heads if any(share.num_heads for share in shares) else self.plain
        costs.observe(num_tokens, max(LEAST_SECONDS, seconds - draft_seconds))
        widths = [len(share.draft_ids) for share in shares if share.source is Source.DRAFT]
        if widths and draft_seconds:
            self.drafting.observe(len(widths), draft_seconds / max(widths))

    def _pace(self, offer: Offer) -> Pace:
        request, kind = offer.request, kind_of(offer)
        pace = request.pace
        if pace is None:
            pace = request.pace = Pace(offer.width, wait=self._waits.get(kind, FIRST_WAIT), kind=kind)
            if request.speculation.schedule is Schedule.HEURISTIC:
                pace.width = _bound(request)
        return pace

    def _choose_auto(self, offers: list[Offer], places: list[int], widths: list[int], load: Load) -> None:
        """Put the widths of these offers into their places of `widths`."""
        fixed = sum(widths) - sum(widths[place] for place in places)
        paces = [self._pace(offer) for offer in offers]
        asked = [(offer.request.order, kind_of(offer), offer.width) for offer in offers], load, fixed
        decided, num_kept = self._decided
        is_kept = decided == asked and num_kept < KEPT_STEPS and all(map(self._is_known, asked[0]))
        if is_kept or (load.has_prompts and all(pace.own for pace in paces)):
            found = [min(pace.width, offer.width) for pace, offer in zip(paces, offers, strict=True)]
        else:
            found = self._best(offers, load, fixed)
        self._decided = (asked, num_kept + 1 if is_kept else 0)
        for offer, pace, place, width in zip(offers, paces, places, found, strict=True):
            pace.width, pace.kind = width, kind_of(offer)
            widths[place] = width or self._rest(pace, offer)
            if widths[place]:
                pace.num_idle = 0

    def _rest(self, pace: Pace, offer: Offer) -> int:
        """The width of a request that had better have none: mostly that. Where only the load or its cost is against it,
        it is thought over soon, as these change.
        """
        pace.num_idle += 1
        if pace.num_idle >= pace.wait:
            self._waits[pace.kind] = pace.wait = min(2 * pace.wait, LAST_WAIT)
            pace.look = pace.wait
            return 1
        pace.look = pace.wait
        if self._gains(offer)[0] > LIKELY:
            pace.look = min(pace.wait, 2 * pace.num_idle)
        return 0

    def _is_known(self, asked: tuple[int, Kind, int]) -> bool:
        group = self._groups.get(asked[1])
        return group is not None and group.first.num_all > WELL_KNOWN

    def _best(self, offers: list[Offer], load: Load, fixed: int) -> list[int]:
        """The widths with the most expected tokens per second."""
        if not self.plain.is_known and not self.with_heads.is_known:
            return [offer.width for offer in offers]
        gains = [self._gains(offer) for offer in offers]
        has_heads = any(offer.source is Source.MEDUSA for offer in offers)
        best_rate, best = 0.0, [0] * len(offers)
        for with_heads in {False, has_heads}:
            some = [i for i, offer in enumerate(offers) if with_heads or offer.source is not Source.MEDUSA]
            rate, found = self._best_of(offers, gains, some, load, fixed, with_heads)
            if rate > best_rate:
                best_rate, best = rate, found
        return best

    def _best_of(
        self,
        offers: list[Offer],
        gains: list[npt.NDArray[np.float64]],
        some: list[int],
        load: Load,
        fixed: int,
        with_heads: bool,
    ) -> tuple[float, list[int]]:
        """The best rate that some of the offers give, and the widths of all."""
        drawn = [i for i in some if offers[i].source is Source.DRAFT]
        deepest = max((offers[i].width for i in drawn), default=0)
        owners = np.array([i for i in some for _ in range(offers[i].width)], np.int64)
        depths = np.array([j + 1 if i in drawn else 0 for i in some for j in range(offers[i].width)], np.int64)
        values = np.concatenate([gains[i] for i in some]) if some else np.zeros(0)
        order = np.argsort(-values, kind="stable")  # a request's guesses stay in order: each gains less
        costs = self.with_heads if with_heads and self.with_heads.is_known else self.plain
        if not costs.is_known:
            costs = self.with_heads
        seconds = costs.expected(range(load.num_tokens + fixed, load.num_tokens + fixed + len(values) + 1))
        pass_seconds = 0.0
        if drawn and self.drafting.is_known:
            pass_seconds = float(self.drafting.expected([len(drawn)])[0])
        best_rate, best = 0.0, [0] * len(offers)
        for depth in range(deepest + 1):
            taken = order[depths[order] <= depth]
            tokens = load.num_sampled + np.concatenate([np.zeros(1), np.cumsum(values[taken])])
            rates = tokens / (seconds[: len(tokens)] + depth * pass_seconds)
            at = int(rates.argmax())
            if rates[at] > best_rate:
                best_rate = float(rates[at])
                best = np.bincount(owners[taken[:at]], minlength=len(offers)).tolist()
        return best_rate, best

    def _gains(self, offer: Offer) -> npt.NDArray[np.float64]:
        """[width] tokens that each guess of an offer should give."""
        kind = kind_of(offer)
        pace = self._pace(offer)
        found = chances(pace.own.get(kind, Acceptance()), self._groups.get(kind, Acceptance()), kind[1])
        gains: npt.NDArray[np.float64] = found.first * np.float64(found.further) ** np.arange(offer.width)
        return gains


def kind_of(offer: Offer) -> Kind:
    request = offer.request
    adapter = request.heads_digest if offer.source is Source.MEDUSA else request.adapter_digest
    return (adapter or request.adapter_digest, offer.source, offer.is_long)


def _bound(request: Request) -> int:
    wanted = request.speculation
    return max(wanted.num_tokens, min(request.num_heads, wanted.num_heads))
