"""How many of the offered draft tokens a step verifies, by each request's schedule. Imports no torch, reads no clock.

`constant`: all. `heuristic`: two more after a step whose drafts were all accepted, else one less (HF transformers'
rule). `auto`: the widths with the most expected tokens per second, from measured acceptance rates and step times. Only
committed steps count: a width that depended on its own step's target would bias the distribution of the output.

Three constants are tuned, all in `states.py`: DECAY, PRIOR_WEIGHT and RETRY.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lorikeet.proto.draft_sources import BY_VALUE, Cost
from lorikeet.proto.params import Schedule
from lorikeet.shard.requests.request import Request, ScheduledRequest, Source
from lorikeet.shard.speculation.costs import Candidates, DraftCosts, Load, Speed, StepCosts
from lorikeet.shard.speculation.drafter import NO_ROWS, Offer, RowOffers, kind_of
from lorikeet.shard.speculation.states import (
    NO_STATE,
    PRIOR_WEIGHT,
    RETRY,
    DraftKind,
    DraftStates,
    Flags,
    Indices,
    Values,
)

MAX_GROUPS = 4096
"""Bound of the memory for groups; the oldest are dropped."""

FEW_VERIFIED = 4
"""Up to this number, drafts of a step are counted one by one: arrays take longer."""
NONE_VERIFIED = np.empty((0, 4), np.int64)
NO_INDICES = np.empty(0, np.int64)


class NetworkLoad(NamedTuple):
    """What heads and a draft model computed in a step."""

    with_heads: bool = False
    num_drawn: int = 0
    """Requests for which the draft model drew."""
    num_attended: int = 0
    """Their known tokens."""
    num_passes: int = 0
    """Most tokens that it drew for one of them."""


NO_NETWORKS = NetworkLoad()


@dataclass(frozen=True)
class _AutoOffers:
    """Offers of one step whose numbers of draft tokens are chosen together, in the order of admission: arrays of n."""

    states: Indices
    """Rows of `DraftStates`."""
    widths: Indices
    """How many tokens at most."""
    lengths: Indices
    """Known tokens of the request."""
    is_drawn: Flags
    """Whether a draft model draws them."""
    needs_heads: Flags

    def take(self, order: Indices) -> "_AutoOffers":
        """Some of them, or in another order."""
        numbers = self.states[order], self.widths[order], self.lengths[order]
        return _AutoOffers(*numbers, self.is_drawn[order], self.needs_heads[order])


class DraftLengthController:
    """The schedules of all requests of a shard."""

    def __init__(self) -> None:
        self.is_used = False
        """Whether any request has had schedule `auto`."""
        speed = Speed()
        self.plain, self.with_heads, self.with_prompts = StepCosts(speed), StepCosts(speed), StepCosts(speed)
        """Costs of steps with newest tokens and drafts only, without and with heads, and of steps with prompts."""
        self.drafting = DraftCosts()
        self.states = DraftStates()
        self._groups: dict[DraftKind, int] = {}
        """Rows of groups."""
        self._rows: dict[Request, dict[DraftKind, int]] = {}
        """Rows of requests."""
        self._load, self._step = 1, 0
        """Requests in the newest step, and its number."""
        self._verified: list[tuple[int, int, int, int]] = []
        """Drafts of the step that is being committed: `Request.admission`, row, accepted ones, whether one was not."""
        self._verified_rows: Indices = NONE_VERIFIED
        """[n, 4] the same of requests that only decode."""
        self._forgotten: list[int] = []
        """Rows of requests that have ended since it was committed."""
        self._decided: tuple[Indices, Indices, Load] | None = None
        """What the newest decision was made for: serial numbers of states, offered widths, and the load."""
        self._widths: Indices = np.zeros(0, np.int64)
        """The newest decision."""
        self._kept: tuple[RowOffers, Load] | None = None
        """What it was made for, if that were only requests that only decode."""
        self._kept_widths: Indices = self._widths
        """The decision for each of them."""
        self._num_kept = 0
        """Steps for which it has held."""
        self._num_chosen = 0

    def is_idle(self, request: Request, kind: DraftKind) -> bool:
        """Whether the request's next step has no drafts of a kind. A request that had none so far is as its group."""
        self._settle()
        row = self._rows.get(request, {}).get(kind, NO_STATE)
        return self._is_idle(kind, row)

    def are_idle(self, rows: Indices) -> bool:
        """Whether the next steps of all these requests have no drafts. rows: of `states`, NO_STATE for one that always
        may.
        """
        self._settle()
        return bool((rows != NO_STATE).all() and self._are_idle(rows).all())

    def _is_idle(self, kind: DraftKind, row: int) -> bool:
        if row == NO_STATE or self.states.follows[row]:
            row = self._groups.get(kind, NO_STATE)
        return row != NO_STATE and bool(self.states.is_idle(row, self._step, self._load))

    def may_try(self, request: Request, kind: DraftKind) -> bool:
        """Whether a request may try a draft source that costs something. A new request follows its group. When the
        group has rested, and of every RETRY new requests, one tries drafts by itself.
        """
        self.is_used = True
        self._settle()
        states, group = self.states, self._groups.get(kind, NO_STATE)
        if group != NO_STATE and states.idle_until[group]:
            row = self.row_of(request, kind)
            is_new, states.is_known[row] = not states.is_known[row], True
            if states.follows[row]:
                states.num_followers[group] += is_new
                has_rested = self._step >= states.idle_until[group]
                if has_rested or (is_new and states.num_followers[group] % RETRY == 0):
                    self._begin(np.array([row]), 0)
                    states.idle_until[row] = max(1, self._step)  # as after a rest
                    if has_rested:
                        states.rest(group, self._step, states.loads[group], states.is_expensive[group])
        return not self.is_idle(request, kind)

    def follows(self, rows: Indices) -> Flags:
        """[n] whether `may_try` decides in this step whether a request follows its group. rows: of `states`, NO_STATE
        with a constant schedule.
        """
        self._settle()
        states, follows = self.states, self._are_auto(rows)
        if np.count_nonzero(follows):
            self.is_used = True
            auto = rows[follows]
            idle_until = states.idle_until[self._groups_of(auto)]
            is_open = (self._step >= idle_until) | ~states.is_known[auto]
            follows[follows] = states.follows[auto] & (idle_until > 0) & is_open
        return follows

    def are_tried(self, rows: Indices) -> Flags:
        """[n] as `may_try`, of requests for which `follows` is false."""
        is_tried: Flags = np.ones(len(rows), bool)
        auto = np.flatnonzero(self._are_auto(rows))
        if len(auto):
            is_tried[auto] = ~self._are_idle(rows[auto])
        return is_tried

    def _are_auto(self, rows: Indices) -> Flags:
        """[n] whether the schedule is `auto`. rows: of `states`, NO_STATE with a constant schedule."""
        is_auto: Flags = rows != NO_STATE
        if np.count_nonzero(is_auto):
            is_auto &= self.states.bounds[rows] == 0
        return is_auto

    def row_of(self, request: Request, kind: DraftKind) -> int:
        """The row of `states` for the request's drafts of a kind."""
        rows = self._rows.setdefault(request, {})
        row = rows.get(kind)
        if row is None:
            row = rows[kind] = self.states.add(kind, self._group(kind))
            if request.speculation.schedule is Schedule.HEURISTIC:
                self.states.bounds[row] = _bound(request)
        return row

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._forgotten += self._rows.pop(request, {}).values()

    def choose(self, offers: Sequence[Offer], load: Load, of_rows: RowOffers = NO_ROWS) -> tuple[list[int], Indices]:
        """The number of draft tokens to take of each offer, and of those for requests that only decode."""
        self._settle()
        self._load = load.num_sampled
        if not offers and self._is_kept(of_rows, load):
            return [], self._deviated(self._kept_widths, of_rows.widths, load)
        self._kept = None
        widths, row_widths = [offer.width for offer in offers], of_rows.widths.copy()
        auto = self._find_auto(offers, widths)
        auto_rows = self._find_auto_rows(of_rows, row_widths)
        if not (auto or len(auto_rows)):
            return widths, row_widths
        self.is_used = True
        asked = [offers[index] for index in auto]
        joint, order = self._join(asked, of_rows, auto_rows)
        self._begin(joint.states, joint.widths)
        for index in auto:
            widths[index] = 0  # as yet
        row_widths[auto_rows] = 0
        num_attended = sum(width * len(offer.request.token_ids) for width, offer in zip(widths, offers, strict=True))
        num_fixed = load.num_fixed + sum(widths) + int(row_widths.sum())
        num_attended += load.num_attended + int(row_widths @ of_rows.lengths)
        chosen = np.empty_like(joint.widths)
        chosen[order] = self._choose_auto(joint, replace(load, num_fixed=num_fixed, num_attended=num_attended))
        for index, width in zip(auto, chosen[: len(auto)].tolist(), strict=True):
            widths[index] = width
        row_widths[auto_rows] = chosen[len(auto) :]
        is_all = not offers and len(auto_rows) == np.count_nonzero(of_rows.widths)
        if is_all and self._decided is not None and (self.states.counts[joint.states, 1, 0] > PRIOR_WEIGHT).all():
            self._kept, self._kept_widths = (of_rows, load), np.zeros_like(row_widths)
            self._kept_widths[auto_rows] = self._widths[np.argsort(order)]
        return widths, row_widths

    def _is_kept(self, of_rows: RowOffers, load: Load) -> bool:
        """Whether the newest decision still holds, and was for the same requests that only decode, and for these only.
        Counts it as one more decision then.
        """
        if self._kept is None or self._num_kept >= RETRY:
            return False
        rows, for_load = self._kept
        is_same = load == for_load and np.array_equal(rows.admissions, of_rows.admissions)
        if not is_same or (rows.states != of_rows.states).any() or (rows.widths != of_rows.widths).any():
            return False
        self._num_kept += 1
        self._num_chosen += 1
        return True

    def _find_auto(self, offers: Sequence[Offer], widths: list[int]) -> list[int]:
        """Indices of the offers whose numbers of draft tokens are to be chosen; others are put into `widths`."""
        auto: list[int] = []
        for index, offer in enumerate(offers):
            request, schedule = offer.request, offer.request.speculation.schedule
            if schedule == Schedule.CONSTANT or BY_VALUE[offer.source].prior is None:
                continue
            kind = kind_of(request, offer.source, offer.is_long)
            row = offer.draft_state = self.row_of(request, kind)
            self.states.is_known[row] = True
            if schedule == Schedule.AUTO:
                if self._is_idle(kind, row):
                    offer.draft_state, widths[index] = NO_STATE, 0
                else:
                    auto.append(index)
                continue
            widths[index] = int(self._heuristic_widths(np.array([row]), np.array([offer.width]))[0])
        return auto

    def _heuristic_widths(self, rows: Indices, offered: Indices) -> Indices:
        """[n] drafts of requests with schedule `heuristic`. rows: of `states`."""
        self._begin(rows, self.states.bounds[rows])
        return np.minimum(offered, self.states.widths[rows])

    def _find_auto_rows(self, of_rows: RowOffers, widths: Indices) -> Indices:
        """Indices of the requests that only decode whose numbers of draft tokens are to be chosen. Those of others are
        put into `widths`.
        """
        auto = np.flatnonzero((of_rows.states != NO_STATE) & (widths > 0))
        if not len(auto):
            return NO_INDICES
        self.states.is_known[of_rows.states[auto]] = True
        is_heuristic = self.states.bounds[of_rows.states[auto]] > 0
        if np.count_nonzero(is_heuristic):
            some, auto = auto[is_heuristic], auto[~is_heuristic]
            widths[some] = self._heuristic_widths(of_rows.states[some], widths[some])
        are_idle = self._are_idle(of_rows.states[auto])
        widths[auto[are_idle]] = 0
        return auto[~are_idle]

    def _join(self, offers: Sequence[Offer], of_rows: RowOffers, rows: Indices) -> tuple[_AutoOffers, Indices]:
        """Offers and those of some rows, in the order of admission, and that order."""
        of_offers = [
            (offer.request.admission, offer.draft_state, offer.width, len(offer.request.token_ids)) for offer in offers
        ]
        admissions, states, widths, lengths = np.array(of_offers, np.int64).reshape(-1, 4).T
        if len(rows):
            of_some = (of_rows.admissions[rows], of_rows.states[rows], of_rows.widths[rows], of_rows.lengths[rows])
            admissions, states, widths, lengths = np.concatenate(
                [(admissions, states, widths, lengths), of_some], axis=1
            )
        is_drawn, needs_heads = np.zeros((2, len(states)), bool)
        costs = [BY_VALUE[offer.source].cost for offer in offers]
        is_drawn[: len(offers)] = [cost is Cost.PASSES for cost in costs]
        needs_heads[: len(offers)] = [cost is Cost.STEP for cost in costs]
        if len(rows):
            needs_heads[len(offers) :] = of_rows.sources[rows] == Source.MEDUSA
            is_drawn[len(offers) :] = of_rows.sources[rows] == Source.DRAFT
        order = np.argsort(admissions, kind="stable")
        return _AutoOffers(states, widths, lengths, is_drawn, needs_heads).take(order), order

    def verified(self, item: ScheduledRequest, num_accepted: int, was_rejected: bool) -> None:
        """Record the acceptance of a committed step's drafts."""
        row = item.draft_state
        if row == NO_STATE:
            return
        if self.states.bounds[row]:
            self._change_heuristic(np.array([row]), np.array([was_rejected]))
            return
        self._verified.append((item.request.admission, row, num_accepted, int(was_rejected)))

    def verified_rows(self, admissions: Indices, rows: Indices, num_accepted: Indices, was_rejected: Flags) -> None:
        """Record the same of requests that only decode, [n] each. rows: of `states`."""
        is_heuristic = self.states.bounds[rows] > 0
        if np.count_nonzero(is_heuristic):
            self._change_heuristic(rows[is_heuristic], was_rejected[is_heuristic])
        verified = np.stack([admissions, rows, num_accepted, was_rejected], axis=1)
        self._verified_rows = verified[~is_heuristic]

    def _change_heuristic(self, rows: Indices, was_rejected: Flags) -> None:
        """[n] one draft less after a rejected one, else two more."""
        widths, bounds = self.states.widths[rows], self.states.bounds[rows]
        self.states.widths[rows] = np.where(was_rejected, np.maximum(widths - 1, 1), np.minimum(widths + 2, bounds))

    def _settle(self) -> None:
        """Count what a committed step verified, in the order of admission."""
        if not (self._verified or self._forgotten or len(self._verified_rows)):
            return
        num_verified = len(self._verified) + len(self._verified_rows)
        if 0 < num_verified <= FEW_VERIFIED:
            few = sorted([*self._verified, *map(tuple, self._verified_rows.tolist())])
            self._verified, self._verified_rows = [], NONE_VERIFIED
            for _, row, num_accepted, was_rejected in few:
                self._count(row, num_accepted, was_rejected)
        elif num_verified:
            verified = np.concatenate([self._verified_rows, np.array(self._verified, np.int64).reshape(-1, 4)])
            self._verified, self._verified_rows = [], NONE_VERIFIED
            _, rows, num_accepted, _ = verified.T
            states, twice = self.states, np.tile(verified, (2, 1))
            twice[len(rows) :, 1] = self._groups_of(rows)
            states.observe(twice[:, 1], twice[:, 0], twice[:, 2], twice[:, 3])
            # after a rest the next one may be right too
            resumed = rows[(num_accepted > 0) & ~states.is_expensive[rows]]
            states.idle_until[resumed] = np.minimum(states.idle_until[resumed], self._step)
        while self._forgotten:
            self.states.remove(self._forgotten.pop())

    def _count(self, row: int, num_accepted: int, was_rejected: int) -> None:
        states = self.states
        states.count(row, num_accepted, was_rejected)
        states.count(int(self._groups_of(np.array([row]))[0]), num_accepted, was_rejected)
        if num_accepted and not states.is_expensive[row]:
            states.idle_until[row] = min(states.idle_until[row], self._step)

    def observe(
        self,
        step: Sequence[ScheduledRequest],
        load: Load,
        seconds: float,
        draft_seconds: tuple[float, float],
        of_networks: NetworkLoad = NO_NETWORKS,
    ) -> None:
        """Record the time of a committed step: `seconds` in all, of them `draft_seconds` in the draft model's first
        pass and in its others. step: without the requests that only decode; load: what all computed, drafts that the
        device did not find included; of_networks: what all of it computed besides.
        """
        self._settle()
        while len(self._groups) > MAX_GROUPS:
            self.states.remove(self._groups.pop(next(iter(self._groups))))
        self._step += 1
        self._load = load.num_sampled + sum(not item.samples for item in step)
        has_prompts = any(item.end - item.start > 1 or not item.samples for item in step)
        costs = self.with_prompts if has_prompts else self.with_heads if of_networks.with_heads else self.plain
        costs.observe(load.num_tokens, load.num_attended, seconds - sum(draft_seconds))
        if of_networks.num_drawn and not has_prompts:
            num_drawn, num_attended, num_passes = of_networks[1:]
            self.drafting.observe(num_drawn, num_attended, draft_seconds, num_passes)

    def _begin(self, rows: Indices, widths: Indices | int) -> None:
        """These requests decide by themselves from now on, with these numbers of draft tokens at first."""
        states = self.states
        begins = states.follows[rows]
        if begins.any():
            states.widths[rows[begins]] = np.broadcast_to(widths, rows.shape)[begins]
            states.follows[rows[begins]] = False

    def _are_idle(self, rows: Indices) -> Flags:
        """[n] as `is_idle`, for requests by rows of `states`."""
        states = self.states
        deciding = np.where(states.follows[rows], self._groups_of(rows), rows)
        idle: Flags = states.is_idle(deciding, self._step, self._load)
        return idle

    def _group(self, kind: DraftKind) -> int:
        if kind not in self._groups:
            self._groups[kind] = self.states.add_group(kind)
        return self._groups[kind]

    def _groups_of(self, rows: Indices) -> Indices:
        """[n] rows of the groups of these requests."""
        groups = self.states.groups[rows]
        if (groups == NO_STATE).any():
            for row in rows[groups == NO_STATE].tolist():
                self.states.groups[row] = self._group(self.states.kinds[row])
            groups = self.states.groups[rows]
        return groups

    def _choose_auto(self, offers: _AutoOffers, load: Load) -> Indices:
        """The widths of these offers."""
        states, rows = self.states, offers.states
        best = self._kept_or_best(offers, load)
        self._num_chosen += 1
        widths = self._deviated(best, offers.widths, load)
        # those whose last decision was to have drafts decide once more: what a step without costs may not be known
        resting = np.flatnonzero((best == 0) & (states.widths[rows] == 0))
        if len(resting):
            widths = widths.copy()
            widths[resting] = self._rest_or_try(offers, resting, load)
        states.widths[rows] = best
        woken = rows[best > 0]
        states.wake(woken)
        states.wake(self._groups_of(woken))
        return widths

    def _deviated(self, widths: Indices, offered: Indices, load: Load) -> Indices:
        """The widths that were chosen, or in every RETRY-th step others within the offers, fewer where all are at their
        limit: measured costs of other widths grow old, and one draft more may be worse where two are better.
        """
        if self._num_chosen % RETRY or load.has_prompts:
            return widths
        change = (1, -1, 2, -2)[self._num_chosen // RETRY % 4]
        if (widths >= offered).all():
            change = -abs(change)
        changed: Indices = np.where(widths > 0, np.minimum(np.maximum(widths + change, 1), offered), 0)
        return changed

    def _rest_or_try(self, offers: _AutoOffers, resting: Indices, load: Load) -> list[int]:
        """The widths of requests for which no drafts look best: indices of their offers."""
        rates = self._rates(offers.states)
        certain, typical = rates.copy(), rates.copy()
        certain[resting] = 1.0
        typical[resting] = self.states.prior_rates(self._groups_of(offers.states[resting]))
        if_certain, of_others = self._best(offers, load, certain), self._best(offers, load, typical)
        return [
            self._rest(int(offers.states[index]), load, not if_certain[index], rests_group=not of_others[index])
            for index in resting.tolist()
        ]

    def _rest(self, row: int, load: Load, is_expensive: bool, rests_group: bool) -> int:
        """The width of a request for which no drafts look best: one after a rest, and 0 if that changes nothing.
        rests_group: whether drafts would not pay for a new request either.
        """
        states = self.states
        if states.idle_until[row] and not states.is_tried[row]:
            states.is_tried[row] = True
            return 1
        if states.is_tried[row]:
            states.retry_after[row] = min(2 * states.retry_after[row], RETRY**2)
        states.rest(row, self._step, load.num_sampled, is_expensive)
        if rests_group:
            group = self._groups_of(np.array([row]))[0]
            states.retry_after[group] = states.retry_after[row]
            states.rest(group, self._step, load.num_sampled, is_expensive)
        return 0

    def _kept_or_best(self, offers: _AutoOffers, load: Load) -> Indices:
        """The last decision while nothing changes, else a new one. In steps with prompts, the widths of the last step
        that had none.
        """
        states, decided = self.states, self._decided
        serials, num_verified = states.serials[offers.states], states.counts[offers.states, 1, 0]
        if decided is not None and decided[2] == load and self._num_kept < RETRY:
            is_same = np.array_equal(decided[0], serials) and np.array_equal(decided[1], offers.widths)
            if is_same and (num_verified > PRIOR_WEIGHT).all():
                self._num_kept += 1
                return self._widths
        if load.has_prompts and num_verified.all():
            self._widths = np.minimum(states.widths[offers.states], offers.widths)
        else:
            self._widths = self._best(offers, load, self._rates(offers.states))
        # width 0 may have looked best because its cost was not known: after the next step it is
        self._decided = (serials, offers.widths, load) if self._widths.all() else None
        self._num_kept = 0
        return self._widths

    def _rates(self, rows: Indices) -> Values:
        return self.states.rates(rows, self._groups_of(rows))

    def _best(self, offers: _AutoOffers, load: Load, rates: Values) -> Indices:
        """The widths with the most expected tokens per second; all that is offered before any step was measured.
        rates: [n, 2] as of `DraftStates.rates`.
        """
        best_rate, best = 0.0, np.zeros_like(offers.widths)
        for with_heads in {False, bool(offers.needs_heads.any())}:
            some = offers.widths if with_heads else np.where(offers.needs_heads, 0, offers.widths)
            costs = self._costs(load, with_heads)
            if costs is None:
                return offers.widths
            rate, widths = Candidates.of(rates, some, offers.is_drawn, offers.lengths).best(load, costs, self.drafting)
            if rate > best_rate:
                best_rate, best = rate, widths
        return best

    def _costs(self, load: Load, with_heads: bool) -> StepCosts | None:
        """Costs of steps like this one, or else of the most similar ones."""
        alike = (self.with_prompts,) if load.has_prompts else ()
        others = (self.with_heads, self.plain) if with_heads else (self.plain, self.with_heads)
        return next((costs for costs in (*alike, *others) if costs.is_known), None)


def _bound(request: Request) -> int:
    params = request.speculation
    return max(params.num_tokens, min(request.num_heads, params.num_heads))
