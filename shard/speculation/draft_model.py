"""Drafts of a draft model: what it has computed of each request, and what it takes in. Its passes are in
`draft_network.py`. Imports no torch.

Its KV is in pages with the same numbers as the target's. The tokens that it has yet to take in are planned like a
prompt; it drafts for a request only when it has caught up (Chen et al. 2023; Leviathan et al. 2023).
"""

from array import array
from collections.abc import Sequence
from typing import Self

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import Method
from lorikeet.shard.requests.request import Request, ScheduledRequest
from lorikeet.shard.speculation.drafter import Drafter, DraftSettings, Offer, Pages
from lorikeet.shard.speculation.medusa import num_heads

ALWAYS_FITS = 2
"""Tokens that a draft model lags behind after a step whose drafts were all accepted."""


class DraftModelDrafter(Drafter):
    """Which pages hold KV of the draft model, and how far it has come in each request."""

    value = pb.SOURCE_DRAFT

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._computed = array("q", [-1] * len(pages.num_uses))
        """By page: the use for which all of its KV of the draft model is there."""
        self._taken_in: set[int] = set()
        """Pages that the draft model writes in the step that is planned."""

    @classmethod
    def make(cls, settings: DraftSettings, pages: Pages) -> Self | None:
        return cls(pages) if settings.has_draft_model else None

    def takes(self, request: Request) -> bool:
        """Heads come before a draft model."""
        params = request.speculation
        if not params.num_tokens:
            return False
        return params.method == Method.DRAFT or (params.method == Method.AUTO and not num_heads(request))

    def propose(self, request: Request, room: int) -> Offer | None:
        width = min(request.speculation.num_tokens, room)
        return Offer(request, self.value, width, []) if width > 0 else None

    def begin(self) -> None:
        self._taken_in.clear()

    def take_in(self, item: ScheduledRequest, is_offered: bool, num_left: int) -> int:
        """Let the draft model take in the tokens it lacks of those the host knows, as far as the budget goes."""
        if item.is_decode and not is_offered:
            return 0
        request, size = item.request, self._pages.size
        start, end = self._skip(request), min(item.end, len(request.token_ids))
        if end - start > ALWAYS_FITS:
            end = min(end, start + max(0, num_left))
        pages = request.page_ids[start // size : -(-end // size)]
        if start >= end or not self._taken_in.isdisjoint(pages):
            return 0  # another request computes these: they are there in the next step
        self._taken_in.update(pages)
        item.draft_start, item.draft_end = start, end
        request.num_draft_computed = end
        return end - start if end - start > ALWAYS_FITS else 0

    def is_ready(self, item: ScheduledRequest) -> bool:
        return item.draft_end == item.end

    def committed(self, item: ScheduledRequest, token_ids: Sequence[int], head_ids: Sequence[int]) -> None:
        if item.draft_end <= item.draft_start:
            return
        request, end, size = item.request, item.draft_end, self._pages.size
        if item.num_drawn:
            num_accepted = max(0, len(token_ids) - 1)
            end += min(num_accepted, len(item.draft_ids) - 1)
            request.num_draft_computed = end
        for page in request.page_ids[item.draft_start // size : end // size]:
            self._computed[page] = self._pages.num_uses[page]

    def release(self, request: Request) -> None:
        request.num_draft_computed = 0

    def _skip(self, request: Request) -> int:
        """Advance the request's count over pages that hold KV of the draft model already."""
        num_full, pages = request.num_draft_computed // self._pages.size, request.page_ids
        while num_full < len(pages) and self._computed[pages[num_full]] == self._pages.num_uses[pages[num_full]]:
            num_full += 1
        request.num_draft_computed = max(request.num_draft_computed, num_full * self._pages.size)
        return request.num_draft_computed
