"""Drafts of a draft model: what it has computed of each request, and what it takes in. Its passes are in
`draft_network.py`. Imports no torch.

Its KV is in pages with the same numbers as the target's. The tokens that it has yet to take in are planned like a
prompt; it drafts for a request only when it has caught up (Chen et al. 2023; Leviathan et al. 2023).
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import Method
from lorikeet.shard.requests.request import Request, ScheduledRequest
from lorikeet.shard.speculation.drafter import Drafter, DraftSettings, Offer, Pages
from lorikeet.shard.speculation.medusa import num_heads
from lorikeet.shard.speculation.states import Flags, Indices

Numbers = npt.NDArray[np.int32]
ALWAYS_FITS = 2
"""Tokens that a draft model lags behind after a step whose drafts were all accepted."""


class Passes(NamedTuple):
    """What the draft model computes in a step: arrays of n requests."""

    texts: list[list[int]]
    """[n] their known tokens."""
    page_table: Numbers
    """[n, most pages] KV pages in the order of positions, those of the drafts included."""
    starts: Indices
    """Position of the first token that it takes in."""
    ends: Indices
    """The position after the last one, and of the first token that it draws."""
    rows: Indices
    """Row of device state of each."""
    num_drawn: Indices
    """Draft tokens that it draws."""

    def in_order(self, order: Indices) -> "Passes":
        """These requests in another order."""
        texts, numbers = [self.texts[index] for index in order.tolist()], (each[order] for each in self[2:])
        return Passes(texts, self.page_table[order], *numbers)

    def then(self, later: "Passes | None") -> "Passes":
        """These, and `later` after them."""
        if later is None or not self.texts:
            return later or self
        width = max(self.page_table.shape[1], later.page_table.shape[1])
        tables = [np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in (self.page_table, later.page_table)]
        numbers = (np.concatenate(both) for both in zip(self[2:], later[2:], strict=True))
        return Passes(self.texts + later.texts, np.concatenate(tables), *numbers)


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
        self.computed(request.page_ids[item.draft_start // size : end // size])

    def take_in_rows(self, pages: Indices) -> Flags:
        """Plan that the draft model takes in the newest tokens of requests that only decode, at most ALWAYS_FITS of
        each. pages: [n, 2] the first and the last page of each. Returns [n] whether no other request computes them.
        """
        can_draw = np.ones(len(pages), bool)
        for index, (first, last) in enumerate(pages.tolist()):
            if first in self._taken_in or last in self._taken_in:
                can_draw[index] = False
            else:
                self._taken_in.update((first, last))
        return can_draw

    def computed(self, pages: Iterable[int]) -> None:
        """All of these pages have KV."""
        for page in pages:
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
