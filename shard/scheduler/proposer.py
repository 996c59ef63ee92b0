"""Adds drafts to a planned step. Imports no torch.

Drafts preempt no request: they take free pages and what is left of the budget. The tokens that a draft model has yet to
take in are planned like a prompt; it drafts for a request only when it has caught up.
"""

from collections.abc import Sequence

from lorikeet.shard.requests.request import Request
from lorikeet.shard.requests.scheduled_request import ScheduledRequest, load_of
from lorikeet.shard.scheduler.budget import Budget
from lorikeet.shard.scheduler.draft_length import DraftLengthController
from lorikeet.shard.scheduler.draft_sources import DraftSources, Offer
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.speculation.types import Source

ALWAYS_FITS = 2
"""Tokens that a draft model lags behind after a step whose drafts were all accepted."""


class Proposer:
    """The drafts in the steps of one shard."""

    def __init__(self, cache: KvCache, draft_sources: DraftSources) -> None:
        self.draft_sources = draft_sources
        self.draft_length = DraftLengthController(draft_sources)
        self._cache = cache

    def may_draft(self, request: Request, num_running: int) -> bool:
        """Whether the request may have drafts now, so that its next step depends on tokens that must be known."""
        return self.draft_sources.may_draft(request, num_running) and self.draft_length.wants(request)

    def propose(self, scheduled: Sequence[ScheduledRequest], num_running: int, budget: Budget) -> None:
        """Add drafts to the requests of a step that can use them."""
        offers: list[tuple[ScheduledRequest, Offer]] = []
        taken_in: set[int] = set()  # pages that the draft model writes in this step
        for item in scheduled:
            if not self.draft_sources.may_draft(item.request, num_running):
                continue
            offer = self._offer(item, budget, taken_in)
            if offer is not None:
                offers.append((item, offer))
        if not offers:
            return
        widths = self.draft_length.choose([offer for _, offer in offers], load_of(scheduled))
        for (item, offer), width in zip(offers, widths, strict=True):
            self._add(item, offer, width)

    def committed(self, item: ScheduledRequest, num_accepted: int, has_ended: bool) -> None:
        """Record how many drafts of a committed step were accepted, and what the draft model has computed."""
        if item.draft_ids:
            was_rejected = num_accepted < len(item.draft_ids) and not has_ended
            self.draft_length.verified(item, num_accepted, was_rejected)
        if item.draft_end <= item.draft_start:
            return
        end = item.draft_end
        if item.source is Source.DRAFT:
            end += min(num_accepted, len(item.draft_ids) - 1)
            item.request.num_draft_computed = end
        self._cache.mark_draft(item.request, item.draft_start, end)

    def _offer(self, item: ScheduledRequest, budget: Budget, taken_in: set[int]) -> Offer | None:
        """Drafts that the step may take for a request. Lets the draft model catch up where it may draft."""
        request, sources = item.request, self.draft_sources
        num_heads = sources.num_heads(request)
        if num_heads and item.samples and not self.draft_length.skips(request, Source.MEDUSA):
            item.num_heads = num_heads
        takes_draft_model = sources.takes_draft_model(request) and not self.draft_length.skips(request, Source.DRAFT)
        room = request.max_new_tokens - request.num_output - 1
        if request.drafts_on_device:  # what is being sampled may all be accepted
            room -= request.num_in_flight - 1 + item.num_uncertain
        offer = None
        if room > 0 and item.is_decode:
            offer = _allowed(sources.offer(request, room, item.num_heads > 0, takes_draft_model))
        is_drawn = offer is not None and offer.source is Source.DRAFT
        if takes_draft_model and (is_drawn or not item.is_decode):
            self._catch_up(item, budget, taken_in)
        if request.drafts_on_device and item.num_heads:
            request.head_ids = request.head_ids or [0] * item.num_heads  # the next step may take them
        return None if is_drawn and item.draft_end != item.end else offer

    def _catch_up(self, item: ScheduledRequest, budget: Budget, taken_in: set[int]) -> None:
        """Let the draft model take in the tokens it lacks of those the host knows, as far as the budget goes."""
        request = item.request
        first = self._cache.skip_draft(request)
        end = min(item.end, len(request.token_ids))
        if end - first > ALWAYS_FITS:
            end = min(end, first + max(0, budget.num_left))
        page_size = self._cache.page_size
        pages = request.page_ids[first // page_size : -(-end // page_size)]
        if first >= end or not taken_in.isdisjoint(pages):  # another request computes these: they are there next time
            return
        taken_in.update(pages)
        if end - first > ALWAYS_FITS:
            budget.num_left -= end - first
        item.draft_start, item.draft_end = first, end
        request.num_draft_computed = end

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


def _allowed(offer: Offer | None) -> Offer | None:
    """The offer up to the first token that the request's grammar refuses. A draft model has yet to draw its tokens."""
    if offer is None or not offer.draft_ids:
        return offer
    offer.draft_ids = offer.draft_ids[: offer.request.constraint.num_allowed(offer.draft_ids)]
    offer.width = len(offer.draft_ids)
    return offer if offer.draft_ids else None
