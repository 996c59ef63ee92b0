"""Commands that the first rank sends to each other rank, in order, over a private socket."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lorikeet.proto.params import Composition
from lorikeet.shard.batch.inputs import HeadsRows
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.batch.segments import Segment


class Begin(NamedTuple):
    """Load the model as this rank."""

    config: dict[str, Any]
    rank: int
    host: str
    """Address of the rendezvous store."""
    port: int


class AllocateKv(NamedTuple):
    """Allocate KV pages."""

    num_pages: int


class FreeKv(NamedTuple):
    """Free all KV pages."""


class BeginMemory(NamedTuple):
    """Measure the memory that the steps from here on need."""


class EndMemory(NamedTuple):
    """Agree on the least memory that is left for KV; `spare` bytes stay free."""

    spare: int


class Serve(NamedTuple):
    """Everything is loaded: do not wait for other ranks any longer than a step takes."""


class Capture(NamedTuple):
    """Capture these steps as graphs, and verify them if `is_checked`."""

    padding: Padding
    bounds: Sequence[Bounds]
    is_checked: bool


class AllocateAdapters(NamedTuple):
    """Allocate slots and host memory for adapters."""

    num_slots: int
    host_bytes: int


class WarmUpAdapters(NamedTuple):
    """Compile the kernels of adapters."""


class StepCommand(NamedTuple):
    """Compute a step. On CPU the command holds the tokens; on a device the first rank broadcasts them in the group."""

    segments: Sequence[Segment]
    num_tokens: int
    token_ids: Sequence[int] | None
    logits_rows: Sequence[int]
    heads: HeadsRows


class Read(NamedTuple):
    """Read an adapter into host memory, in parallel with the steps."""

    digest: str


class Put(NamedTuple):
    """Put an adapter that every rank has read into a slot."""

    slot: int
    digest: str


class Clear(NamedTuple):
    """Clear a slot."""

    slot: int


class Compose(NamedTuple):
    """Make a slot the sum of adapters in others."""

    slot: int
    composition: Composition
    slots: Sequence[int]


class Forget(NamedTuple):
    """Drop an adapter from host memory."""

    digest: str


Command = (
    AllocateKv
    | FreeKv
    | BeginMemory
    | EndMemory
    | Serve
    | WarmUpAdapters
    | Capture
    | AllocateAdapters
    | StepCommand
    | Read
    | Put
    | Clear
    | Compose
    | Forget
)
