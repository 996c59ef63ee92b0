"""Commands that the first rank sends to each other rank, in order, over a private socket."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lorikeet.shard.batch.inputs import HeadsRow, Segment
from lorikeet.shard.batch.padding import Bounds, Padding


@dataclass(frozen=True)
class Begin:
    """Load the model as this rank."""

    config: dict[str, Any]
    rank: int
    host: str
    """Address of the rendezvous store."""
    port: int


@dataclass(frozen=True)
class AllocateKv:
    """Allocate KV pages."""

    num_pages: int


@dataclass(frozen=True)
class FreeKv:
    """Free all KV pages."""


@dataclass(frozen=True)
class Capture:
    """Capture these steps as graphs, and verify them if `is_checked`."""

    padding: Padding
    bounds: Sequence[Bounds]
    is_checked: bool


@dataclass(frozen=True)
class AllocateAdapters:
    """Allocate slots and host memory for adapters."""

    num_slots: int
    host_bytes: int


@dataclass(frozen=True)
class Step:
    """Compute a step. On CPU the command holds the tokens; on a device the first rank broadcasts them in the group."""

    segments: Sequence[Segment]
    num_tokens: int
    token_ids: Sequence[int] | None
    logits_rows: Sequence[int]
    heads: Sequence[HeadsRow] = field(default_factory=list)


@dataclass(frozen=True)
class Read:
    """Read an adapter into host memory, in parallel with the steps."""

    digest: str


@dataclass(frozen=True)
class Put:
    """Put an adapter that every rank has read into a slot."""

    slot: int
    digest: str


@dataclass(frozen=True)
class Clear:
    """Clear a slot."""

    slot: int


@dataclass(frozen=True)
class Forget:
    """Drop an adapter from host memory."""

    digest: str


Command = AllocateKv | FreeKv | Capture | AllocateAdapters | Step | Read | Put | Clear | Forget
