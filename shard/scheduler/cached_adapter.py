"""An adapter in host memory, and what it is worth to keep it there: what loading it again would cost, times how often
it is used, per byte. Imports no torch.

GreedyDual-Size-Frequency (Cherkasova 1998): an adapter that is used is worth `floor + uses * cost / size`, and the
floor rises to the worth of each one that leaves. So an adapter that is used no more leaves some time, however often it
was used before.
"""

from dataclasses import dataclass
from typing import Protocol

FIXED_COST = 8 * 2**20
"""What opening, checking and placing a file costs, in bytes that are read in the same time."""
EXPECTED_USES = 4
"""What an adapter counts as until it is used: requests wait for it."""


class Content(Protocol):
    """An adapter in host memory."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_heads(self) -> int:
        """Its Medusa heads, which have the same slot; 0 without."""
        ...


@dataclass(eq=False)
class CachedAdapter:
    """An adapter in host memory."""

    digest: str
    content: Content
    worth: float = 0.0
    slot: int = -1
    num_users: int = 0
    """Running requests."""
    num_uses: int = 0
    """Requests that have run since it was loaded."""
    is_pinned: bool = False
    is_copying: bool = False
    """Is being copied into its slot."""
    is_draining: bool = False
    """Takes no new request: another adapter needs its slot."""
    evict_when_idle: bool = False
    """Is unloaded as soon as no request uses it."""

    @property
    def is_resident(self) -> bool:
        """Whether a request could use it now."""
        return self.slot >= 0 and not (self.is_copying or self.is_draining or self.evict_when_idle)

    @property
    def may_leave(self) -> bool:
        return self.num_users == 0 and not self.is_pinned and not self.is_copying


class AdapterWorth:
    """Of the adapters of one shard."""

    def __init__(self) -> None:
        self._floor = 0.0

    def of(self, num_uses: int, num_bytes: int) -> float:
        """Of an adapter that is used now, for the `num_uses`-th time since it was loaded; 0 for one just loaded."""
        return self._floor + (num_uses or EXPECTED_USES) * (num_bytes + FIXED_COST) / max(1, num_bytes)

    def gave_way(self, worth: float) -> None:
        """An adapter of that worth was evicted."""
        self._floor = max(self._floor, worth)
