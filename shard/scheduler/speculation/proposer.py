"""The drafts of a step, planned together once everything else of it is. Imports no torch.

Nobody goes for a draft: drafts take pages that are free and what is left of the budget. What a draft model has yet to
take in of a request is planned like a prompt; it guesses for a request only when it has caught up.
"""

from collections.abc import Sequence

from lorikeet.shard.scheduler.budget import Budget
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.request import Method, Request, Source
from lorikeet.shard.scheduler.scheduled_request import ScheduledRequest
from lorikeet.shard.scheduler.speculation.draft_length import DraftLengthController, Load
from lorikeet.shard.scheduler.speculation.sources import DraftSources, Offer

ALWAYS_FITS = 2
"""Tokens that a draft model lags behind after a step whose drafts were all accepted."""


class Proposer:
    """Who guesses how much in the steps of one shard."""

    def __init__(self, cache: KvCache, draft_sources: DraftSources) -> None:
        self.draft_sources = draft_sources
        self.draft_length = DraftLengthController(draft_sources)
        self._cache = cache

    def may_draft(self, request: Request, num_running: int) -> bool:
        """Whether the request may have drafts now, so that its next step hangs on tokens that must be known."""
        return self.draft_sources.may_draft(request, num_running) and self.draft_length.wants(request)

    def propose(self, shares: Sequence[ScheduledRequest], num_running: int, budget: Budget) -> None:
        """Add drafts to the shares behind which they can count."""
        offers: list[tuple[ScheduledRequest, Offer]] = []
        taken_in: set[int] = set()  # pages that the draft model writes in this step
        for share in shares:
            request = share.request
            if request.speculation.method is Method.OFF or not self.draft_sources.may_draft(request, num_running):
                continue
            num_heads = self.draft_sources.num_heads(request)
            if num_heads and share.samples and not self.draft_length.passes(request, Source.MEDUSA):
                share.num_heads = num_heads
            takes_draft_model = self.draft_sources.takes_draft_model(request)
            if takes_draft_model and self.draft_length.passes(request, Source.DRAFT):
                takes_draft_model = False
            offer = self._offer(share, takes_draft_model)
            is_drawn = offer is not None and offer.source is Source.DRAFT
            if takes_draft_model and (is_drawn or not share.is_decode):
                self._catch_up(share, budget, taken_in)
            if offer is not None and (not is_drawn or share.draft_end == share.end):
                offers.append((share, offer))
        if not offers:
            return
        load = Load(
            sum(share.samples for share in shares),
            sum(share.num_tokens for share in shares),
            sum(share.num_attended for share in shares),
        )
        widths = self.draft_length.choose([offer for _, offer in offers], load)
        for (share, offer), width in zip(offers, widths, strict=True):
            self._add(share, offer, width)

    def committed(self, share: ScheduledRequest, num_accepted: int, has_ended: bool) -> None:
        """Take note of how many drafts of a committed step were right, and of what the draft model has computed."""
        if share.draft_ids:
            was_rejected = num_accepted < len(share.draft_ids) and not has_ended
            self.draft_length.verified(share, num_accepted, was_rejected)
        if share.draft_end <= share.draft_start:
            return
        end = share.draft_end
        if share.source is Source.DRAFT:
            end += min(num_accepted, len(share.draft_ids) - 1)
            share.request.num_draft_computed = end
        self._cache.mark_draft(share.request, share.draft_start, end)

    def _offer(self, share: ScheduledRequest, takes_draft_model: bool) -> Offer | None:
        request = share.request
        room = request.max_new_tokens - request.num_output - 1
        if room <= 0 or not share.is_decode:
            return None
        return self.draft_sources.offer(request, room, share.num_heads > 0, takes_draft_model)

    def _catch_up(self, share: ScheduledRequest, budget: Budget, taken_in: set[int]) -> None:
        """Let the draft model take in what it lacks of the tokens that the host knows, as far as the budget goes."""
        request = share.request
        first = self._cache.skip_draft(request)
        end = min(share.end, len(request.token_ids))
        if end - first > ALWAYS_FITS:
            end = min(end, first + max(0, budget.num_left))
        page_size = self._cache.page_size
        pages = request.page_ids[first // page_size : -(-end // page_size)]
        if first >= end or not taken_in.isdisjoint(pages):  # another is computing the same: it is there next time
            return
        taken_in.update(pages)
        if end - first > ALWAYS_FITS:
            budget.num_left -= end - first
        share.draft_start, share.draft_end = first, end
        request.num_draft_computed = end

    def _add(self, share: ScheduledRequest, offer: Offer, width: int) -> None:
        """Give a share so many drafts of an offer, or as many as there are pages for."""
        request = share.request
        while width > 0 and not self._cache.grow(request, share.end + width):
            width -= 1
        if width <= 0:
            return
        share.draft_ids = offer.draft_ids[:width] or [0] * width
        share.source, share.draft_state = offer.source, offer.draft_state
        request.is_draft = True
