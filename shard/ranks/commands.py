"""What the first rank tells the others, in order, over a socket that only the two have."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lorikeet.shard.batch.inputs import HeadsRow, Segment
from lorikeet.shard.batch.padding import Bounds, Padding


@dataclass(frozen=True)
class Begin:
    """Be this rank, and load the model."""

    config: dict[str, Any]
    rank: int
    host: str
    """Where the ranks meet."""
    port: int


@dataclass(frozen=True)
class AllocateKv:
    """Have so many pages."""

    num_pages: int


@dataclass(frozen=True)
class FreeKv:
    """Have no pages."""


@dataclass(frozen=True)
class Capture:
    """Capture these steps, and check them where that is wanted."""

    padding: Padding
    bounds: Sequence[Bounds]
    is_checked: bool


@dataclass(frozen=True)
class AllocateAdapters:
    """Have room for adapters."""

    num_slots: int
    host_bytes: int


@dataclass(frozen=True)
class Step:
    """Compute along. On CPU the tokens are in here, on a device the first rank sends them by the group."""

    segments: Sequence[Segment]
    num_tokens: int
    token_ids: Sequence[int] | None
    logits_rows: Sequence[int]
    heads: Sequence[HeadsRow] = field(default_factory=list)


@dataclass(frozen=True)
class Read:
    """Bring an adapter into host memory, beside the steps."""

    digest: str


@dataclass(frozen=True)
class Put:
    """Let a slot mean an adapter that every rank has read."""

    slot: int
    digest: str


@dataclass(frozen=True)
class Clear:
    """Let a slot mean nothing."""

    slot: int


@dataclass(frozen=True)
class Forget:
    """Let go of an adapter."""

    digest: str


Command = AllocateKv | FreeKv | Capture | AllocateAdapters | Step | Read | Put | Clear | Forget
