"""How many of the offered guesses a step verifies, by each request's schedule. Imports no torch, reads no clock.

`constant`: all. `heuristic`: two more after a step whose guesses were all right, else one less (HF transformers'
rule). `auto`: the widths with the most expected tokens per second, from what was learnt of acceptance and of the costs
of steps. Only committed steps teach: a width that depended on its own step's target would bend the law.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lorikeet.shard.scheduler.request import Kind, Method, Request, Schedule, Source
from lorikeet.shard.scheduler.scheduled_request import ScheduledRequest
from lorikeet.shard.scheduler.speculation.acceptance import Acceptance, Chances, Group
from lorikeet.shard.scheduler.speculation.costs import StepCosts
from lorikeet.shard.scheduler.speculation.draft_costs import DraftCosts
from lorikeet.shard.scheduler.speculation.draft_tokens import DraftTokens
from lorikeet.shard.scheduler.speculation.sources import DraftSources, Offer

FIRST_WAIT, LAST_WAIT = 16, 512
"""Steps without a guess after which one is tried again, at first and at most; doubled each time it was wrong."""
LEAST_SECONDS = 1e-6
"""Clocks of host and device may differ, and no step takes nothing."""
LIKELY = 0.3
"""A guess with at least such a chance is kept back by what it costs, not by being wrong."""
HOPELESS, HOPELESS_WAIT = 0.2, 64
"""Where guesses of a draft model were right so rarely, a new request has none for so many steps."""
LIGHTER = 0.75
"""A load is lighter that is at most this part of one under which guesses cost too much."""
TRIED_AGAIN = 16
"""One of so many newcomers finds out by itself whether what cost too much still does."""
TRIED_BESIDE, WAYS = 16, (1, -1, 2, -2)
"""At every so many choices so many guesses more than the best are taken, by turns: costs beside it grow old too, and
one more may be worse where two are better.
"""
KEPT_STEPS, WELL_KNOWN = 8, 60
"""A decision holds so many steps while nothing has changed, once its kinds of guesses were seen so often."""

MOST_KINDS = 4096
"""Of which something is remembered beyond a request; the oldest are forgotten."""


@dataclass
class DraftState:
    """What a schedule remembers of one request's guesses of one kind."""

    kind: Kind
    width: int
    """Of the newest step that could have had some."""
    num_idle: int = 0
    """Steps since that had none."""
    look: int = 0
    """So many of these until it is thought over again …"""
    wait: int = FIRST_WAIT
    """… and until one is tried against all expectation."""
    load: int = 0
    """Requests beside which these, right as they would be, were not worth their cost; 0 where that is not why."""
    from_prior: bool = False
    """Whether that is others' experience alone."""
    own: Acceptance = field(default_factory=Acceptance)

    def is_disabled(self, load: int) -> bool:
        """Whether the next step has none, without a thought, beside so many requests in all."""
        return self.width == 0 and self.num_idle + 1 < self.look and load > LIGHTER * self.load


@dataclass(frozen=True)
class Load:
    """The rest of a step."""

    num_sampled: int
    """Requests that get a token."""
    num_tokens: int
    """Without guesses."""
    num_attended: int = field(default=0, compare=False)
    """Positions that these attend to, summed over them: another at each step of the same requests."""
    num_fixed: int = 0
    """DraftTokens that others have than those whose widths are chosen."""

    @property
    def has_prompts(self) -> bool:
        return self.num_tokens > self.num_sampled


class DraftLengthController:
    """The schedules of all requests of a shard."""

    def __init__(self, draft_sources: DraftSources) -> None:
        self.is_used = False
        """Whether any request goes by what is learnt here."""
        self._draft_sources = draft_sources
        self.plain, self.with_heads, self.with_prompts = StepCosts(), StepCosts(), StepCosts()
        """Of steps of newest tokens and guesses alone, without and with heads, and of steps with prompts."""
        self.drafting = DraftCosts()
        self._groups: dict[Kind, Group] = {}
        self._waits: dict[Kind, int] = {}
        self._load = 1
        """Requests in the newest step."""
        self._too_expensive: dict[Kind, tuple[int, int]] = {}
        """By kind: beside how many requests it was not worth its cost, and how many newcomers were told."""
        self._decided: tuple[object, list[int], int] = (None, [], 0)
        """The newest decision: what about, the widths, and for how many steps it has held."""
        self._num_chosen = 0

    def wants(self, request: Request) -> bool:
        """Whether the request might have guesses in its next step, which then has to wait for its newest token."""
        wanted = request.speculation
        if wanted.schedule is not Schedule.AUTO:
            return True
        if self._draft_sources.takes_draft_model(request) and not self._is_disabled(request, Source.DRAFT):
            return True
        if self._draft_sources.num_heads(request) and not self._is_disabled(request, Source.MEDUSA):
            return True
        if wanted.method not in (Method.LOOKUP, Method.AUTO) or not wanted.num_tokens:
            return False
        length = 1 if request.draft_source is None else request.draft_source.match_length
        return length > 0 and not self._is_disabled(request, Source.LOOKUP, length >= self._draft_sources.ngram_long)

    def passes(self, request: Request, source: Source) -> bool:
        """Whether heads or a draft model do nothing for a request in a step that is being planned."""
        if request.speculation.schedule is not Schedule.AUTO:
            return False
        self.is_used = True
        kind = kind_of(request, source)
        if source is Source.DRAFT and kind not in request.draft_states:
            request.draft_states[kind] = self._begin(kind)
        if not self._is_disabled(request, source):
            return False
        request.draft_states[kind].num_idle += 1
        return True

    def _is_disabled(self, request: Request, source: Source, is_long: bool = False) -> bool:
        """Who rests by what others found out begins anew once that holds no longer."""
        kind = kind_of(request, source, is_long)
        draft_state = request.draft_states.get(kind)
        if draft_state is None:
            return False
        if draft_state.is_disabled(self._load) and not (draft_state.from_prior and kind not in self._too_expensive):
            return True
        if draft_state.from_prior:
            request.draft_states[kind] = self._first_draft_state(kind)
        return False

    def _begin(self, kind: Kind) -> DraftState:
        """Of a new request: one that waits, where a draft model would take in the prompt in vain."""
        group = self._groups.get(kind)
        load, num_announced = self._too_expensive.get(kind, (0, 0))
        if load and self._load > LIGHTER * load:
            self._too_expensive[kind] = (load, num_announced + 1)
            if num_announced % TRIED_AGAIN < TRIED_AGAIN - 1:
                return DraftState(kind, 0, look=LAST_WAIT, wait=LAST_WAIT, load=load, from_prior=True)
        elif group is not None and group.first.chance < HOPELESS:
            wait = max(HOPELESS_WAIT, self._waits.get(kind, 0))
            return DraftState(kind, 0, look=wait, wait=wait)
        return self._first_draft_state(kind)

    def _first_draft_state(self, kind: Kind, width: int = 1) -> DraftState:
        return DraftState(kind, width, wait=self._waits.get(kind, FIRST_WAIT))

    def choose(self, offers: Sequence[Offer], load: Load) -> list[int]:
        """How many guesses of each offer to take."""
        widths = [offer.width for offer in offers]
        auto: list[int] = []
        draft_states: list[DraftState] = []
        num_fixed = num_attended = 0
        for index, offer in enumerate(offers):
            schedule = offer.request.speculation.schedule
            if schedule is not Schedule.CONSTANT:
                draft_state = offer.draft_state = self._draft_state(offer)
                if schedule is Schedule.HEURISTIC:
                    widths[index] = min(offer.width, draft_state.width)
                elif draft_state.is_disabled(load.num_sampled):
                    draft_state.num_idle += 1
                    widths[index] = 0
                else:
                    auto.append(index)
                    draft_states.append(draft_state)
                    continue
            num_fixed += widths[index]
            num_attended += widths[index] * len(offer.request.token_ids)
        self._load = load.num_sampled
        if auto:
            self.is_used = True
            beside = replace(load, num_fixed=num_fixed, num_attended=load.num_attended + num_attended)
            found = self._choose_auto([offers[index] for index in auto], draft_states, beside)
            for index, width in zip(auto, found, strict=True):
                widths[index] = width
        return widths

    def verified(self, share: ScheduledRequest, num_accepted: int, was_rejected: bool) -> None:
        """Learn from a committed step with guesses."""
        request, draft_state = share.request, share.draft_state
        if draft_state is None:
            return
        if request.speculation.schedule is Schedule.HEURISTIC:
            draft_state.width = (
                max(1, draft_state.width - 1) if was_rejected else min(draft_state.width + 2, _bound(request))
            )
            return
        group = self._groups.setdefault(draft_state.kind, Group(draft_state.kind[1]))
        group.observe(draft_state.own, num_accepted, was_rejected)
        _forget(self._groups)
        if num_accepted and not draft_state.load:
            self._wait(draft_state, FIRST_WAIT)

    def observe(self, shares: Sequence[ScheduledRequest], seconds: float, draft_seconds: tuple[float, float]) -> None:
        """Learn from a committed step: all of it took `seconds`, of them the draft model's first pass and its others
        `draft_seconds`.
        """
        self._load = len(shares)
        num_tokens = sum(share.num_tokens for share in shares)
        has_prompts = any(share.end - share.start > 1 or not share.samples for share in shares)
        with_heads = any(share.num_heads for share in shares)
        costs = self.with_prompts if has_prompts else self.with_heads if with_heads else self.plain
        num_attended = sum(share.num_attended for share in shares)
        costs.observe(num_tokens, num_attended, max(LEAST_SECONDS, seconds - sum(draft_seconds)))
        drawn = [share for share in shares if share.source is Source.DRAFT and share.draft_ids]
        if drawn and not has_prompts:
            num_passes = max(len(share.draft_ids) for share in drawn)
            self.drafting.observe(len(drawn), sum(share.end for share in drawn), draft_seconds, num_passes)

    def _draft_state(self, offer: Offer) -> DraftState:
        request, kind = offer.request, kind_of(offer.request, offer.source, offer.is_long)
        draft_state = request.draft_states.get(kind)
        if draft_state is None:
            is_heuristic = request.speculation.schedule is Schedule.HEURISTIC
            width = _bound(request) if is_heuristic else offer.width
            draft_state = request.draft_states[kind] = self._first_draft_state(kind, width)
        return draft_state

    def _choose_auto(self, offers: list[Offer], draft_states: list[DraftState], load: Load) -> list[int]:
        """The widths of these offers, each with its pace."""
        asked = [
            (offer.request.order, draft_state.kind, offer.width)
            for offer, draft_state in zip(offers, draft_states, strict=True)
        ]
        key = (asked, load)
        decided, found, num_kept = self._decided
        if decided == key and num_kept < KEPT_STEPS and all(map(self._is_known, asked)):
            self._decided = (key, found, num_kept + 1)
        else:
            if load.has_prompts and all(draft_state.own.first.num_all for draft_state in draft_states):
                found = [
                    min(draft_state.width, offer.width) for draft_state, offer in zip(draft_states, offers, strict=True)
                ]
            else:
                found = self._best(offers, draft_states, load)
            # none may have looked best because what that costs was not known: with the next step it is
            self._decided = (key if all(found) else None, found, 0)
        self._num_chosen += 1
        if self._num_chosen % TRIED_BESIDE == 0 and not load.has_prompts:
            found = _beside(found, offers, WAYS[self._num_chosen // TRIED_BESIDE % len(WAYS)])
        widths = list(found)
        for index, (draft_state, width) in enumerate(zip(draft_states, found, strict=True)):
            draft_state.width = width
            if width:
                draft_state.load = 0
            else:
                widths[index] = self._rest(draft_state)
            if widths[index]:
                draft_state.num_idle = 0
        if self._too_expensive:  # what pays for some is dear for none
            for draft_state in draft_states:
                if draft_state.width:
                    self._too_expensive.pop(draft_state.kind, None)
        return widths

    def _rest(self, draft_state: DraftState) -> int:
        """The width of a request that had better have none: mostly that. Where only the cost is against it, it is
        thought over soon and then less and less, for a draft model has to catch up each time, or under a lighter load.
        """
        draft_state.num_idle += 1
        draft_state.load = 0
        if self._chances(draft_state).first > LIKELY:
            draft_state.load = self._load
            if draft_state.num_idle > 1:
                self._too_expensive[draft_state.kind] = (
                    self._load,
                    self._too_expensive.get(draft_state.kind, (0, 0))[1],
                )
                _forget(self._too_expensive)
            draft_state.look = min(2 * draft_state.num_idle, draft_state.wait)
        if draft_state.num_idle >= draft_state.wait:
            self._wait(draft_state, min(2 * draft_state.wait, LAST_WAIT))
            draft_state.look = min(2, draft_state.wait) if draft_state.load else draft_state.wait
            return 1
        if not draft_state.load:
            draft_state.look = draft_state.wait
        return 0

    def _wait(self, draft_state: DraftState, num_steps: int) -> None:
        self._waits[draft_state.kind] = draft_state.wait = num_steps
        _forget(self._waits)

    def _chances(self, draft_state: DraftState) -> Chances:
        return (self._groups.get(draft_state.kind) or Group(draft_state.kind[1])).chances(draft_state.own)

    def _is_known(self, asked: tuple[int, Kind, int]) -> bool:
        group = self._groups.get(asked[1])
        return group is not None and group.first.rate.num_all > WELL_KNOWN

    def _best(self, offers: list[Offer], draft_states: list[DraftState], load: Load) -> list[int]:
        """The widths with the most expected tokens per second; all there is where nothing is known of that."""
        found = [self._chances(draft_state) for draft_state in draft_states]
        chances = np.array([(each.first, each.further) for each in found])
        is_drawn = np.array([offer.source is Source.DRAFT for offer in offers])
        lengths = np.array([len(offer.request.token_ids) for offer in offers])
        has_heads = any(offer.source is Source.MEDUSA for offer in offers)
        best_rate, best = 0.0, [0] * len(offers)
        for with_heads in {False, has_heads}:
            some = [offer.width if with_heads or offer.source is not Source.MEDUSA else 0 for offer in offers]
            costs = self._costs(load, with_heads)
            if costs is None:
                return [offer.width for offer in offers]
            drafts = DraftTokens.of(chances, np.array(some), is_drawn, lengths)
            rate, widths = self._best_of(drafts, load, costs)
            if rate > best_rate:
                best_rate, best = rate, widths.tolist()
        return best

    def _costs(self, load: Load, with_heads: bool) -> StepCosts | None:
        """Of steps like that one, or else of those that are most like it."""
        alike = (self.with_prompts,) if load.has_prompts else ()
        others = (self.with_heads, self.plain) if with_heads else (self.plain, self.with_heads)
        return next((each for each in (*alike, *others) if each.is_known), None)

    def _best_of(self, drafts: DraftTokens, load: Load, costs: StepCosts) -> tuple[float, npt.NDArray[np.int64]]:
        """The best rate that some guesses give, and the widths of all offers."""
        num_tokens = load.num_tokens + load.num_fixed
        seconds = costs.expected(range(num_tokens, num_tokens + len(drafts.values) + 1))
        num_drafted = int(drafts.attended[drafts.passes == 1].sum())
        draft_seconds = self.drafting.expected(drafts.num_drawn, num_drafted, drafts.num_passes)
        is_there = drafts.passes <= np.arange(drafts.num_passes + 1)[:, None]  # [depths, guesses]
        nums_taken = is_there.cumsum(axis=1)  # [depths, guesses] of each depth, up to the likeliest ones in order
        tokens = load.num_sampled + (is_there * drafts.values).cumsum(axis=1)
        attended = load.num_attended + (is_there * drafts.attended).cumsum(axis=1)
        rates = tokens / (seconds[nums_taken] + costs.per_attended * attended + draft_seconds[:, None])
        rate = load.num_sampled / float(seconds[0] + costs.per_attended * load.num_attended)
        if not rates.size or rates.max() <= rate:
            return rate, np.zeros(drafts.num_offers, np.int64)
        depth, last = np.unravel_index(rates.argmax(), rates.shape)
        taken = drafts.owners[: last + 1][is_there[depth, : last + 1]]
        return float(rates[depth, last]), np.bincount(taken, minlength=drafts.num_offers)


def _beside(widths: Sequence[int], offers: Sequence[Offer], way: int) -> list[int]:
    """So many guesses more, for each that has some, within what is offered: fewer where there are no more."""
    way = -abs(way) if all(width >= offer.width for width, offer in zip(widths, offers, strict=True)) else way
    return [min(max(width + way, 1), offer.width) if width else 0 for width, offer in zip(widths, offers, strict=True)]


def kind_of(request: Request, source: Source, is_long: bool = False) -> Kind:
    adapter = request.heads_digest if source is Source.MEDUSA else request.adapter_digest
    return (adapter or request.adapter_digest, source, is_long)


def _forget(known: dict[Kind, Any]) -> None:
    while len(known) > MOST_KINDS:
        del known[next(iter(known))]


def _bound(request: Request) -> int:
    wanted = request.speculation
    return max(wanted.num_tokens, min(request.num_heads, wanted.num_heads))
