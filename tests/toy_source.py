"""A draft source that exists in tests only: its row, and its drafter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from lorikeet.proto.draft_sources import Colours, Cost, DraftPlace, SourceRow, register, unregister
from lorikeet.proto.params import Method
from lorikeet.shard.requests.request import Request
from lorikeet.shard.speculation.drafter import Drafter, Offer

TOY = SourceRow(
    "toy", 9, "Toy", "proposed by a toy, and accepted", DraftPlace.HOST, "nothing",
    Colours("#010203", "#040506", "#070809", "#0a0b0c", 32), Cost.NONE, 0.5,
)  # fmt: skip


@contextmanager
def registered() -> Iterator[None]:
    """Have the toy among the draft sources."""
    register(TOY)
    try:
        yield
    finally:
        unregister(TOY)


class ToyDrafter(Drafter):
    """Proposes the rest of a text, by the number of the request."""

    value = TOY.value
    texts: ClassVar[dict[int, list[int]]] = {}
    """Whole texts, prompt included."""

    def takes(self, request: Request) -> bool:
        return request.speculation.method == Method.AUTO and request.key[1] in self.texts

    def propose(self, request: Request, room: int) -> Offer | None:
        first = len(request.token_ids)
        draft_ids = self.texts[request.key[1]][first : first + min(room, request.speculation.num_tokens)]
        return Offer(request, self.value, len(draft_ids), draft_ids, match_length=99) if draft_ids else None
