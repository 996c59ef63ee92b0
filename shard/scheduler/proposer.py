"""Adds drafts to a planned step. Imports no torch.

Drafts preempt no request: they take free pages and what is left of the budget.
"""

from collections.abc import Sequence

import numpy as np

from lorikeet.proto.params import Schedule
from lorikeet.shard.requests.request import Request, ScheduledRequest, Source, load_of
from lorikeet.shard.scheduler.budget import Budget
from lorikeet.shard.scheduler.decoding import Committed, DecodeStep
from lorikeet.shard.scheduler.draft_rows import (
    HISTORY_STATES,
    LOOKUP_STATES,
    NETWORK_STATE,
    NUM_STATES,
    NetworkStates,
    RowSources,
)
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.speculation.costs import NO_LOAD, Load
from lorikeet.shard.speculation.draft_model import DraftModelDrafter
from lorikeet.shard.speculation.drafter import (
    NO_ROWS,
    Drafter,
    DraftSettings,
    Offer,
    Pages,
    RowDrafts,
    RowOffers,
    kind_of,
)
from lorikeet.shard.speculation.drafters import Drafters, best_offer
from lorikeet.shard.speculation.history import HistoryDrafter
from lorikeet.shard.speculation.length import DraftLengthController
from lorikeet.shard.speculation.lookup import LookupDrafter
from lorikeet.shard.speculation.medusa import MedusaDrafter, num_heads
from lorikeet.shard.speculation.states import NO_STATE, Indices


class Proposer:
    """The drafts in the steps of one shard."""

    def __init__(self, cache: KvCache, settings: DraftSettings) -> None:
        self.drafters = Drafters(settings, Pages(cache.page_size, cache.num_uses))
        self.draft_length = DraftLengthController()
        self._cache = cache

    def may_draft(self, request: Request, num_running: int) -> bool:
        """Whether the request may have drafts now, so that its next step depends on tokens that must be known."""
        drafters = self.drafters.of(request, num_running)
        if request.num_output + request.num_in_flight + 1 >= request.max_new_tokens:  # no draft may follow
            return False
        if request.speculation.schedule != Schedule.AUTO:
            return bool(drafters)
        is_idle = self.draft_length.is_idle
        return any(not is_idle(request, kind) for drafter in drafters for kind in drafter.kinds(request))

    def may_draft_rows(self, states: Indices) -> bool:
        """The same of any of the requests with a match, by rows of `DraftStates`; NO_STATE with a constant schedule."""
        return bool(len(states)) and not self.draft_length.are_idle(states)

    def propose(
        self,
        scheduled: Sequence[ScheduledRequest],
        num_running: int,
        budget: Budget,
        decoding: Load = NO_LOAD,
        of_decoding: RowOffers = NO_ROWS,
    ) -> RowDrafts:
        """Add drafts to the requests of a step that can use them. decoding: what the step computes besides, of requests
        that only decode; of_decoding: what these may have. Returns what they have.
        """
        self.drafters.begin()
        offers: list[tuple[ScheduledRequest, Offer]] = []
        rows, num_heads, taking_in = self._try_networks(of_decoding)
        for item in scheduled:
            drafters = self._trying(item.request, num_running)
            if drafters and (offer := self._offer(item, drafters, budget)) is not None:
                offers.append((item, offer))
        row_widths = rows.widths
        if offers or row_widths.any():
            load = load_of(scheduled) + decoding
            widths, row_widths = self.draft_length.choose([offer for _, offer in offers], load, rows)
            for (item, offer), width in zip(offers, widths, strict=True):
                self._add(item, offer, width)
        return RowDrafts(row_widths, rows.states, rows.sources, num_heads, taking_in)

    def unready(self, networks: NetworkStates) -> Indices:
        """Indices of the requests that only decode and are to be planned like others in this step: it has yet to be
        decided whether they try a network, or the draft model lags behind.
        """
        are_open = self.draft_length.follows(networks.states)
        if networks.lags.any():
            are_open |= networks.lags & self.draft_length.are_tried(networks.states)
        return networks.indices[are_open]

    def _try_networks(self, rows: RowOffers) -> tuple[RowOffers, Indices | None, Indices | None]:
        """The offers with those of networks that are tried; [n] the tokens of heads that the step computes, and [k] the
        requests of which the draft model takes in tokens, as in `RowDrafts`.
        """
        networks = rows.networks
        if networks is None:
            return rows, None, None
        are_tried, num_heads = self.draft_length.are_tried(networks.states), np.zeros(len(rows.widths), np.int64)
        num_heads[networks.indices] = np.where(are_tried, networks.num_heads, 0)
        drawn = np.flatnonzero(are_tried & (networks.sources == Source.DRAFT) & (networks.widths > 0))
        taking_in = None
        if len(drawn):
            are_tried[drawn] = can_draw = self.drafters.take_in_rows(networks.pages[drawn])
            networks.widths[drawn[~can_draw]] = 0
            rows.widths[networks.indices[drawn[~can_draw]]] = 0
            taking_in = networks.indices[drawn[can_draw]]
        return rows.with_networks(are_tried), num_heads, taking_in

    def row_sources(self, request: Request) -> RowSources:
        """What drafts for a request that only decodes, while few enough requests run."""
        drafters = self.drafters.of(request)
        lookup = next((each for each in drafters if isinstance(each, LookupDrafter)), None)
        history = next((each for each in drafters if isinstance(each, HistoryDrafter)), None)
        has_heads = any(isinstance(each, MedusaDrafter) for each in drafters)
        has_draft_model = any(isinstance(each, DraftModelDrafter) for each in drafters)
        kinds: list[tuple[int, bool] | None] = [None] * NUM_STATES
        if request.speculation.schedule is not Schedule.CONSTANT:
            if lookup is not None:
                kinds[LOOKUP_STATES:HISTORY_STATES] = (Source.LOOKUP, False), (Source.LOOKUP, True)
            if history is not None:
                kinds[HISTORY_STATES:NETWORK_STATE] = (Source.HISTORY, False), (Source.HISTORY, True)
            if has_heads or has_draft_model:
                kinds[NETWORK_STATE] = Source.MEDUSA if has_heads else Source.DRAFT, False
        row_of = self.draft_length.row_of
        return RowSources(
            lookup is not None,
            None if lookup is None or request.drafts_on_device else lookup.index_of(request),
            None if history is None else history.pair(request),
            num_heads(request) if has_heads else 0,
            has_draft_model,
            [NO_STATE if kind is None else row_of(request, kind_of(request, *kind)) for kind in kinds],
        )

    def committed(
        self, item: ScheduledRequest, token_ids: Sequence[int], head_ids: Sequence[int], has_ended: bool
    ) -> None:
        """Record the tokens of a committed step, and how many of its drafts were accepted."""
        if item.draft_ids:
            num_accepted = max(0, len(token_ids) - 1)
            was_rejected = num_accepted < len(item.draft_ids) and not has_ended
            self.draft_length.verified(item, num_accepted, was_rejected)
        self.drafters.committed(item, token_ids, head_ids)

    def committed_rows(self, step: DecodeStep, committed: Committed) -> None:
        """Record how many of the drafts of requests that only decode, and continue, were accepted."""
        self.drafters.computed_rows(committed.draft_pages)
        if not step.has_drafts:
            return
        is_verified = committed.continues & (committed.num_drafted > 0) & (step.draft_states != NO_STATE)
        if is_verified.any():
            num_accepted, num_drafted = committed.num_taken[is_verified] - 1, committed.num_drafted[is_verified]
            admissions, states = step.members.admissions[is_verified], step.draft_states[is_verified]
            self.draft_length.verified_rows(admissions, states, num_accepted, num_accepted < num_drafted)

    def release(self, request: Request) -> None:
        """The request lost its pages."""
        self.drafters.release(request)

    def finished(self, request: Request, has_failed: bool) -> None:
        """The request has ended."""
        self.draft_length.forget(request)
        if not has_failed:
            self.drafters.finished(request)

    def _trying(self, request: Request, num_running: int) -> list[Drafter]:
        """The sources of a request, without those that cost something and do not pay now."""
        drafters = [] if request.constraint.is_slow else self.drafters.of(request, num_running)
        if request.speculation.schedule != Schedule.AUTO:
            return drafters
        return [
            drafter
            for drafter in drafters
            if not drafter.is_costly or any(self.draft_length.may_try(request, kind) for kind in drafter.kinds(request))
        ]

    def _offer(self, item: ScheduledRequest, drafters: list[Drafter], budget: Budget) -> Offer | None:
        """Drafts that the step may take for a request. Lets the sources compute what they need."""
        request = item.request
        room = request.max_new_tokens - request.num_output - 1
        if request.drafts_on_device:  # what is being sampled may all be accepted
            room -= request.num_in_flight - 1 + item.num_uncertain
        offer = best_offer(drafters, request, room) if room > 0 and item.is_decode else None
        for drafter in drafters:
            is_offered = offer is not None and offer.source == drafter.value
            budget.spend_on_drafts(drafter.take_in(item, is_offered, budget.num_left))
        return offer if offer is not None and self.drafters.is_ready(item, offer) else None

    def _add(self, item: ScheduledRequest, offer: Offer, width: int) -> None:
        """Add up to `width` draft tokens of an offer, as many as there are pages for."""
        request = item.request
        while width > 0 and not self._cache.grow(request, item.end_of_pages + width):
            width -= 1
        if width <= 0:
            return
        item.draft_ids = [0] * width if request.drafts_on_device else offer.draft_ids[:width] or [0] * width
        item.source, item.draft_state = offer.source, offer.draft_state
        item.is_on_device = request.drafts_on_device
        request.is_draft = not item.is_on_device
