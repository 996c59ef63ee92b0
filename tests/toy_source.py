"""The row of a draft source that exists in tests only."""

from collections.abc import Iterator
from contextlib import contextmanager

from lorikeet.proto.draft_sources import Colours, Place, SourceRow, register, unregister

TOY = SourceRow(
    "toy", 9, "Toy", "proposed by a toy, and accepted", Place.HOST, "nothing",
    Colours("#010203", "#040506", "#070809", "#0a0b0c", 32), 0.5,
)  # fmt: skip


@contextmanager
def registered() -> Iterator[None]:
    """Have the toy among the draft sources."""
    register(TOY)
    try:
        yield
    finally:
        unregister(TOY)
