"""How many of the offered draft tokens a step verifies, by each request's schedule. Imports no torch, reads no clock.

`constant`: all. `heuristic`: two more after a step whose drafts were all accepted, else one less (HF transformers'
rule). `auto`: the widths with the most expected tokens per second, from measured acceptance rates and step times. Only
committed steps count: a width that depended on its own step's target would bias the distribution of the output.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lorikeet.proto.params import Method, Schedule
from lorikeet.shard.requests.request import Request
from lorikeet.shard.requests.scheduled_request import ScheduledRequest, load_of
from lorikeet.shard.scheduler.draft_sources import DraftSources, Offer
from lorikeet.shard.speculation.acceptance import FIRST_RETRY, LIGHTER, AcceptanceRates, DraftState, Group
from lorikeet.shard.speculation.costs import DraftCosts, StepCosts
from lorikeet.shard.speculation.throughput import Candidates, Load
from lorikeet.shard.speculation.types import DraftKind, Source

LAST_RETRY = 512
"""Most steps without drafts after which one is tried again; doubled each time it was rejected."""
LIKELY = 0.3
"""Above this acceptance rate a draft is withheld because of its cost, not because it would be rejected."""
HOPELESS, HOPELESS_RETRY = 0.2, 64
"""Below this acceptance rate of a draft model, a new request has no drafts for this number of steps."""
RETRIED = 16
"""One of this many new requests measures by itself whether drafts that cost too much still do."""
EXPLORE_EVERY, DEVIATIONS = 16, (1, -1, 2, -2)
"""Every this many choices the widths deviate from the best by one of these, in turn: measured costs of other widths
grow old, and one draft more may be worse where two are better.
"""
KEPT_STEPS, WELL_KNOWN = 8, 60
"""Steps that a decision holds while nothing changes, and verified drafts of its kinds before it may."""
MOST_KINDS = 4096
"""Kinds with statistics beyond a request; the oldest are dropped."""


class DraftLengthController:
    """The schedules of all requests of a shard."""

    def __init__(self, draft_sources: DraftSources) -> None:
        self.is_used = False
        """Whether any request has had schedule `auto`."""
        self._draft_sources = draft_sources
        self.plain, self.with_heads, self.with_prompts = StepCosts(), StepCosts(), StepCosts()
        """Costs of steps with newest tokens and drafts only, without and with heads, and of steps with prompts."""
        self.drafting = DraftCosts()
        self._groups: dict[DraftKind, Group] = {}
        self._retry_after: dict[DraftKind, int] = {}
        self._load = 1
        """Requests in the newest step."""
        self._too_expensive: dict[DraftKind, tuple[int, int]] = {}
        """By kind: requests in a step in which drafts did not pay, and the new requests that were disabled for it."""
        self._decided: tuple[object, list[int], int] = (None, [], 0)
        """The newest decision: its inputs, the widths, and the steps for which it has held."""
        self._num_chosen = 0

    def wants(self, request: Request) -> bool:
        """Whether the request might have drafts in its next step, which then has to wait for its newest token."""
        params, sources = request.speculation, self._draft_sources
        if params.schedule is not Schedule.AUTO:
            return True
        if sources.takes_draft_model(request) and not self._is_disabled(request, Source.DRAFT):
            return True
        if sources.num_heads(request) and not self._is_disabled(request, Source.MEDUSA):
            return True
        if params.method not in (Method.LOOKUP, Method.AUTO) or not params.num_tokens:
            return False
        if request.tenant and not all(self._is_disabled(request, Source.HISTORY, is_long) for is_long in (False, True)):
            return True
        length = 1 if request.draft_source is None else request.draft_source.match_length
        return length > 0 and not self._is_disabled(request, Source.LOOKUP, length >= sources.ngram_long)

    def skips(self, request: Request, source: Source) -> bool:
        """Whether heads or a draft model are not run for a request in the step being planned."""
        if request.speculation.schedule is not Schedule.AUTO:
            return False
        self.is_used = True
        kind = kind_of(request, source)
        if source is Source.DRAFT and kind not in request.draft_states:
            request.draft_states[kind] = self._initial_state(kind)
        if not self._is_disabled(request, source):
            return False
        request.draft_states[kind].num_idle += 1
        return True

    def _is_disabled(self, request: Request, source: Source, is_long: bool = False) -> bool:
        """A request that is disabled by the prior from others starts anew once that no longer holds."""
        kind = kind_of(request, source, is_long)
        state = request.draft_states.get(kind)
        if state is None:
            return False
        if state.is_disabled(self._load) and not (state.from_prior and kind not in self._too_expensive):
            return True
        if state.from_prior:
            request.draft_states[kind] = self._enabled_state(kind)
        return False

    def _initial_state(self, kind: DraftKind) -> DraftState:
        """State of a new request: disabled at first where the draft model would take in the prompt without any gain."""
        group = self._groups.get(kind)
        load, num_disabled = self._too_expensive.get(kind, (0, 0))
        if load and self._load > LIGHTER * load:
            self._too_expensive[kind] = (load, num_disabled + 1)
            if num_disabled % RETRIED < RETRIED - 1:
                return DraftState(kind, 0, 0, LAST_RETRY, LAST_RETRY, expensive_at=load, from_prior=True)
        elif group is not None and group.first.mean < HOPELESS:
            steps = max(HOPELESS_RETRY, self._retry_after.get(kind, 0))
            return DraftState(kind, 0, 0, steps, steps)
        return self._enabled_state(kind)

    def _enabled_state(self, kind: DraftKind, width: int = 1) -> DraftState:
        return DraftState(kind, width, retry_after=self._retry_after.get(kind, FIRST_RETRY))

    def choose(self, offers: Sequence[Offer], load: Load) -> list[int]:
        """The number of draft tokens to take of each offer."""
        widths = [offer.width for offer in offers]
        auto: dict[int, DraftState] = {}
        for index, offer in enumerate(offers):
            schedule = offer.request.speculation.schedule
            if schedule is Schedule.CONSTANT or offer.source is Source.GRAMMAR:  # forced tokens are always accepted
                continue
            state = offer.draft_state = self._draft_state(offer)
            if schedule is Schedule.HEURISTIC:
                widths[index] = min(offer.width, state.width)
            elif state.is_disabled(load.num_sampled):
                state.num_idle += 1
                widths[index] = 0
            else:
                auto[index] = state
        self._load = load.num_sampled
        if auto:
            self.is_used = True
            fixed = {index: width for index, width in enumerate(widths) if index not in auto}
            num_attended = sum(width * len(offers[index].request.token_ids) for index, width in fixed.items())
            load = replace(load, num_fixed=sum(fixed.values()), num_attended=load.num_attended + num_attended)
            found = self._choose_auto([offers[index] for index in auto], list(auto.values()), load)
            for index, width in zip(auto, found, strict=True):
                widths[index] = width
        return widths

    def verified(self, item: ScheduledRequest, num_accepted: int, was_rejected: bool) -> None:
        """Record the acceptance of a committed step's drafts."""
        state = item.draft_state
        if state is None:
            return
        if item.request.speculation.schedule is Schedule.HEURISTIC:
            state.width = max(1, state.width - 1) if was_rejected else min(state.width + 2, _bound(item.request))
            return
        group = self._groups.setdefault(state.kind, Group(state.kind[1]))
        group.observe(state.own, num_accepted, was_rejected)
        _drop_oldest(self._groups)
        if num_accepted and not state.expensive_at:
            self._set_retry(state, FIRST_RETRY)

    def observe(self, step: Sequence[ScheduledRequest], seconds: float, draft_seconds: tuple[float, float]) -> None:
        """Record the time of a committed step: `seconds` in all, of them `draft_seconds` in the draft model's first
        pass and in its others.
        """
        self._load = len(step)
        load = load_of(step)
        has_prompts = any(item.end - item.start > 1 or not item.samples for item in step)
        with_heads = any(item.num_heads for item in step)
        costs = self.with_prompts if has_prompts else self.with_heads if with_heads else self.plain
        costs.observe(load.num_tokens, load.num_attended, seconds - sum(draft_seconds))
        drawn = [item for item in step if item.num_drawn]
        if drawn and not has_prompts:
            num_passes = max(item.num_drawn for item in drawn)
            self.drafting.observe(len(drawn), sum(item.end for item in drawn), draft_seconds, num_passes)

    def _draft_state(self, offer: Offer) -> DraftState:
        request, kind = offer.request, kind_of(offer.request, offer.source, offer.is_long)
        if kind not in request.draft_states:
            is_heuristic = request.speculation.schedule is Schedule.HEURISTIC
            width = _bound(request) if is_heuristic else offer.width
            request.draft_states[kind] = self._enabled_state(kind, width)
        return request.draft_states[kind]

    def _choose_auto(self, offers: list[Offer], states: list[DraftState], load: Load) -> list[int]:
        """The widths of these offers, each with its state."""
        best = self._kept_or_best(offers, states, load)
        self._num_chosen += 1
        if self._num_chosen % EXPLORE_EVERY == 0 and not load.has_prompts:
            best = _deviate(best, offers, DEVIATIONS[self._num_chosen // EXPLORE_EVERY % len(DEVIATIONS)])
        widths = list(best)
        for index, (state, width) in enumerate(zip(states, best, strict=True)):
            state.width = width
            if width:
                state.expensive_at = 0
            else:
                widths[index] = self._withhold(state)
            if widths[index]:
                state.num_idle = 0
        for state in states:  # drafts that pay for some requests are too expensive for none
            if state.width:
                self._too_expensive.pop(state.kind, None)
        return widths

    def _kept_or_best(self, offers: list[Offer], states: list[DraftState], load: Load) -> list[int]:
        """The last decision while it holds, else a new one."""
        asked = [(offer.request.order, state.kind, offer.width) for offer, state in zip(offers, states, strict=True)]
        key = (asked, load)
        decided, widths, num_kept = self._decided
        if decided == key and num_kept < KEPT_STEPS and all(self._is_well_known(state) for state in states):
            self._decided = (key, widths, num_kept + 1)
            return widths
        if load.has_prompts and all(state.own.first.num_verified for state in states):
            widths = [min(state.width, offer.width) for state, offer in zip(states, offers, strict=True)]
        else:
            widths = self._best(offers, states, load)
        # width 0 may have looked best because its cost was not known: after the next step it is
        self._decided = (key if all(widths) else None, widths, 0)
        return widths

    def _withhold(self, state: DraftState) -> int:
        """The width of a request for which no drafts look best: mostly 0. Where only their cost is the reason, the
        width is computed again soon and then less and less often, because a draft model has to catch up each time, or
        under a lighter load.
        """
        state.num_idle += 1
        state.expensive_at = 0
        if self._rates(state).first > LIKELY:
            state.expensive_at = self._load
            if state.num_idle > 1:
                self._too_expensive[state.kind] = (self._load, self._too_expensive.get(state.kind, (0, 0))[1])
                _drop_oldest(self._too_expensive)
            state.recheck_after = min(2 * state.num_idle, state.retry_after)
        if state.num_idle >= state.retry_after:
            self._set_retry(state, min(2 * state.retry_after, LAST_RETRY))
            state.recheck_after = min(2, state.retry_after) if state.expensive_at else state.retry_after
            return 1
        if not state.expensive_at:
            state.recheck_after = state.retry_after
        return 0

    def _set_retry(self, state: DraftState, num_steps: int) -> None:
        self._retry_after[state.kind] = state.retry_after = num_steps
        _drop_oldest(self._retry_after)

    def _rates(self, state: DraftState) -> AcceptanceRates:
        return (self._groups.get(state.kind) or Group(state.kind[1])).rates(state.own)

    def _is_well_known(self, state: DraftState) -> bool:
        group = self._groups.get(state.kind)
        return group is not None and group.first.rate.num_verified > WELL_KNOWN

    def _best(self, offers: list[Offer], states: list[DraftState], load: Load) -> list[int]:
        """The widths with the most expected tokens per second; all that is offered before any step was measured."""
        found = [self._rates(state) for state in states]
        rates = np.array([(each.first, each.further) for each in found])
        is_drawn = np.array([offer.source is Source.DRAFT for offer in offers])
        lengths = np.array([len(offer.request.token_ids) for offer in offers])
        has_heads = any(offer.source is Source.MEDUSA for offer in offers)
        best_rate, best = 0.0, [0] * len(offers)
        for with_heads in {False, has_heads}:
            some = [offer.width if with_heads or offer.source is not Source.MEDUSA else 0 for offer in offers]
            costs = self._costs(load, with_heads)
            if costs is None:
                return [offer.width for offer in offers]
            rate, widths = Candidates.of(rates, np.array(some), is_drawn, lengths).best(load, costs, self.drafting)
            if rate > best_rate:
                best_rate, best = rate, widths.tolist()
        return best

    def _costs(self, load: Load, with_heads: bool) -> StepCosts | None:
        """Costs of steps like this one, or else of the most similar ones."""
        alike = (self.with_prompts,) if load.has_prompts else ()
        others = (self.with_heads, self.plain) if with_heads else (self.plain, self.with_heads)
        return next((each for each in (*alike, *others) if each.is_known), None)


def _deviate(widths: Sequence[int], offers: Sequence[Offer], change: int) -> list[int]:
    """Change the widths of those that have drafts, within the offers; reduce them where all are at their limit."""
    pairs = [(width, offer.width) for width, offer in zip(widths, offers, strict=True)]
    if all(width >= most for width, most in pairs):
        change = -abs(change)
    return [min(max(width + change, 1), most) if width else 0 for width, most in pairs]


def kind_of(request: Request, source: Source, is_long: bool = False) -> DraftKind:
    adapter = request.heads_digest if source is Source.MEDUSA else request.adapter_digest
    return (adapter or request.adapter_digest, source, is_long)


def _drop_oldest(known: dict[DraftKind, Any]) -> None:
    while len(known) > MOST_KINDS:
        del known[next(iter(known))]


def _bound(request: Request) -> int:
    params = request.speculation
    return max(params.num_tokens, min(request.num_heads, params.num_heads))
