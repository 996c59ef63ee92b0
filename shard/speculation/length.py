"""How many of the offered draft tokens a step verifies, by each request's schedule. Imports no torch, reads no clock.

`constant`: all. `heuristic`: two more after a step whose drafts were all accepted, else one less (HF transformers'
rule). `auto`: the widths with the most expected tokens per second, from measured acceptance rates and step times. Only
committed steps count: a width that depended on its own step's target would bias the distribution of the output.

Three constants are tuned, all in `acceptance.py`: DECAY, PRIOR_WEIGHT and RETRY.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from lorikeet.proto.draft_sources import BY_VALUE, Cost
from lorikeet.proto.params import Schedule
from lorikeet.shard.requests.request import Request, ScheduledRequest, load_of
from lorikeet.shard.speculation.costs import (
    CERTAIN,
    NO_LOAD,
    PRIOR_WEIGHT,
    RETRY,
    Acceptance,
    AcceptanceRates,
    Candidates,
    DraftCosts,
    DraftKind,
    DraftState,
    Load,
    Speed,
    StepCosts,
)
from lorikeet.shard.speculation.drafter import Offer, kind_of

MAX_GROUPS = 4096
"""Bound of the memory for groups; the oldest are dropped."""


class DraftLengthController:
    """The schedules of all requests of a shard."""

    def __init__(self) -> None:
        self.is_used = False
        """Whether any request has had schedule `auto`."""
        speed = Speed()
        self.plain, self.with_heads, self.with_prompts = StepCosts(speed), StepCosts(speed), StepCosts(speed)
        """Costs of steps with newest tokens and drafts only, without and with heads, and of steps with prompts."""
        self.drafting = DraftCosts()
        self._groups: dict[DraftKind, DraftState] = {}
        self._states: dict[Request, dict[DraftKind, DraftState]] = {}
        self._load, self._step = 1, 0
        """Requests in the newest step, and its number."""
        self._decided: tuple[object, list[int], int] = (None, [], 0)
        """The newest decision: its inputs, the widths, and the steps for which it has held."""
        self._num_chosen = 0

    def is_idle(self, request: Request, kind: DraftKind) -> bool:
        """Whether the request's next step has no drafts of a kind. A request that had none so far is as its group."""
        state = self._states.get(request, {}).get(kind) or self._groups.get(kind)
        return state is not None and state.is_idle(self._step, self._load)

    def may_try(self, request: Request, kind: DraftKind) -> bool:
        """Whether a request may try a draft source that costs something. A new request follows its group. When the
        group has rested, and of every RETRY new requests, one tries drafts by itself.
        """
        self.is_used = True
        states, group = self._states.setdefault(request, {}), self._groups.get(kind)
        state = states.get(kind)
        if group is not None and group.idle_until and state in (None, group):
            group.num_followers += state is None
            states[kind] = group
            has_rested = self._step >= group.idle_until
            if has_rested or (state is None and group.num_followers % RETRY == 0):
                del states[kind]
                self._state(request, kind, 0).idle_until = max(1, self._step)  # as after a rest
                if has_rested:
                    group.rest(self._step, group.load, group.is_expensive)
        return not self.is_idle(request, kind)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._states.pop(request, None)

    def choose(self, offers: Sequence[Offer], load: Load) -> list[int]:
        """The number of draft tokens to take of each offer."""
        widths = [offer.width for offer in offers]
        auto: dict[int, DraftState] = {}
        self._load = load.num_sampled
        for index, offer in enumerate(offers):
            request, schedule = offer.request, offer.request.speculation.schedule
            if schedule == Schedule.CONSTANT or BY_VALUE[offer.source].prior is None:
                continue
            kind = kind_of(request, offer.source, offer.is_long)
            if schedule == Schedule.HEURISTIC:
                offer.draft_state = self._state(request, kind, _bound(request))
                widths[index] = min(offer.width, offer.draft_state.width)
            elif self.is_idle(request, kind):
                widths[index] = 0
            else:
                auto[index] = offer.draft_state = self._state(request, kind, offer.width)
        if auto:
            self.is_used = True
            fixed = {index: width for index, width in enumerate(widths) if index not in auto}
            num_attended = sum(width * len(offers[index].request.token_ids) for index, width in fixed.items())
            num_fixed = load.num_fixed + sum(fixed.values())
            load = replace(load, num_fixed=num_fixed, num_attended=load.num_attended + num_attended)
            chosen = self._choose_auto([offers[index] for index in auto], list(auto.values()), load)
            for index, width in zip(auto, chosen, strict=True):
                widths[index] = width
        return widths

    def verified(self, item: ScheduledRequest, num_accepted: int, was_rejected: bool) -> None:
        """Record the acceptance of a committed step's drafts."""
        state = item.draft_state
        if state is None:
            return
        if item.request.speculation.schedule == Schedule.HEURISTIC:
            state.width = max(1, state.width - 1) if was_rejected else min(state.width + 2, _bound(item.request))
            return
        state.acceptance.observe(num_accepted, was_rejected)
        self._group(state.kind).acceptance.observe(num_accepted, was_rejected)
        if num_accepted and not state.is_expensive:
            state.idle_until = min(state.idle_until, self._step)  # after a rest: the next one may be right too

    def observe(
        self,
        step: Sequence[ScheduledRequest],
        seconds: float,
        draft_seconds: tuple[float, float],
        decoding: Load = NO_LOAD,
    ) -> None:
        """Record the time of a committed step: `seconds` in all, of them `draft_seconds` in the draft model's first
        pass and in its others. decoding: what the step computed besides, of requests that only decode.
        """
        self._step += 1
        self._load = len(step) + decoding.num_sampled
        load = load_of(step) + decoding
        has_prompts = any(item.end - item.start > 1 or not item.samples for item in step)
        with_heads = any(item.num_heads for item in step)
        costs = self.with_prompts if has_prompts else self.with_heads if with_heads else self.plain
        costs.observe(load.num_tokens, load.num_attended, seconds - sum(draft_seconds))
        drawn = [item for item in step if item.num_drawn]
        if drawn and not has_prompts:
            num_passes = max(item.num_drawn for item in drawn)
            self.drafting.observe(len(drawn), sum(item.end for item in drawn), draft_seconds, num_passes)

    def _state(self, request: Request, kind: DraftKind, width: int = 1) -> DraftState:
        states, group = self._states.setdefault(request, {}), self._group(kind)
        if states.get(kind, group) is group:
            states[kind] = DraftState(kind, width)
        return states[kind]

    def _group(self, kind: DraftKind) -> DraftState:
        if kind not in self._groups:
            self._groups[kind] = DraftState.of_group(kind)
            if len(self._groups) > MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
        return self._groups[kind]

    def _choose_auto(self, offers: list[Offer], states: list[DraftState], load: Load) -> list[int]:
        """The widths of these offers, each with its state."""
        best = self._kept_or_best(offers, states, load)
        self._num_chosen += 1
        widths = list(best)
        if self._num_chosen % RETRY == 0 and not load.has_prompts:
            widths = _deviate(best, offers, (1, -1, 2, -2)[self._num_chosen // RETRY % 4])
        # those whose last decision was to have drafts decide once more: what a step without costs may not be known
        resting = [index for index, width in enumerate(best) if not (width or states[index].width)]
        if resting:
            certain = self._best(offers, states, load, dict.fromkeys(resting, CERTAIN))
            typical = {index: Acceptance().rates(self._group(states[index].kind).acceptance) for index in resting}
            of_others = self._best(offers, states, load, typical)
        for index in resting:
            widths[index] = self._rest(states[index], load, not certain[index], rests_group=not of_others[index])
        for state, width in zip(states, best, strict=True):
            state.width = width
            if width:
                state.wake()
                self._group(state.kind).wake()
        return widths

    def _rest(self, state: DraftState, load: Load, is_expensive: bool, rests_group: bool) -> int:
        """The width of a request for which no drafts look best: one after a rest, and 0 if that changes nothing.
        rests_group: whether drafts would not pay for a new request either.
        """
        if state.idle_until and not state.is_tried:
            state.is_tried = True
            return 1
        group = self._group(state.kind)
        if state.is_tried:
            state.retry_after = min(2 * state.retry_after, RETRY**2)
        state.rest(self._step, load.num_sampled, is_expensive)
        if rests_group:
            group.retry_after = state.retry_after
            group.rest(self._step, load.num_sampled, is_expensive)
        return 0

    def _kept_or_best(self, offers: list[Offer], states: list[DraftState], load: Load) -> list[int]:
        """The last decision while nothing changes, else a new one. In steps with prompts, the widths of the last step
        that had none.
        """
        asked = [(offer.request.order, state.kind, offer.width) for offer, state in zip(offers, states, strict=True)]
        key = (asked, load)
        decided, widths, num_kept = self._decided
        is_known = all(state.acceptance.first.num_verified > PRIOR_WEIGHT for state in states)
        if decided == key and num_kept < RETRY and is_known:
            self._decided = (key, widths, num_kept + 1)
            return widths
        if load.has_prompts and all(state.acceptance.first.num_verified for state in states):
            widths = [min(state.width, offer.width) for state, offer in zip(states, offers, strict=True)]
        else:
            widths = self._best(offers, states, load)
        # width 0 may have looked best because its cost was not known: after the next step it is
        self._decided = (key if all(widths) else None, widths, 0)
        return widths

    def _rates(self, state: DraftState) -> AcceptanceRates:
        return state.acceptance.rates(self._group(state.kind).acceptance)

    def _best(
        self,
        offers: list[Offer],
        states: list[DraftState],
        load: Load,
        assumed: Mapping[int, AcceptanceRates] = MappingProxyType({}),
    ) -> list[int]:
        """The widths with the most expected tokens per second; all that is offered before any step was measured.
        assumed: rates by index of the offer, in place of those that were measured.
        """
        rates = [assumed.get(index) or self._rates(state) for index, state in enumerate(states)]
        table = np.array([(rate.first, rate.further) for rate in rates])
        is_drawn = np.array([BY_VALUE[offer.source].cost is Cost.PASSES for offer in offers])
        needs_heads = [BY_VALUE[offer.source].cost is Cost.STEP for offer in offers]
        lengths = np.array([len(offer.request.token_ids) for offer in offers])
        best_rate, best = 0.0, [0] * len(offers)
        for with_heads in {False, any(needs_heads)}:
            some = [
                offer.width if with_heads or not needs else 0 for offer, needs in zip(offers, needs_heads, strict=True)
            ]
            costs = self._costs(load, with_heads)
            if costs is None:
                return [offer.width for offer in offers]
            rate, widths = Candidates.of(table, np.array(some), is_drawn, lengths).best(load, costs, self.drafting)
            if rate > best_rate:
                best_rate, best = rate, widths.tolist()
        return best

    def _costs(self, load: Load, with_heads: bool) -> StepCosts | None:
        """Costs of steps like this one, or else of the most similar ones."""
        alike = (self.with_prompts,) if load.has_prompts else ()
        others = (self.with_heads, self.plain) if with_heads else (self.plain, self.with_heads)
        return next((costs for costs in (*alike, *others) if costs.is_known), None)


def _deviate(widths: Sequence[int], offers: Sequence[Offer], change: int) -> list[int]:
    """Change the widths of those that have drafts, within the offers; reduce them where all are at their limit.

    Measured costs of other widths grow old, and one draft more may be worse where two are better.
    """
    pairs = [(width, offer.width) for width, offer in zip(widths, offers, strict=True)]
    if all(width >= most for width, most in pairs):
        change = -abs(change)
    return [min(max(width + change, 1), most) if width else 0 for width, most in pairs]


def _bound(request: Request) -> int:
    params = request.speculation
    return max(params.num_tokens, min(request.num_heads, params.num_heads))
