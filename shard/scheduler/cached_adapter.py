"""An adapter in host memory, and the score by which adapters are evicted: the cost of loading it again, times how often
it is used, per byte. Imports no torch.

GreedyDual-Size-Frequency (Cherkasova 1998): the score of an adapter that is used is `floor + uses * cost / size`, and
the floor rises to the score of each evicted adapter. So an adapter that is no longer used is evicted at some time,
however often it was used before.
"""

from dataclasses import dataclass
from typing import Protocol

FIXED_COST = 8 * 2**20
"""What opening, checking and placing a file costs, in bytes that are read in the same time."""
EXPECTED_USES = 4
"""Uses that an adapter is credited with until its first use: requests wait for it."""


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
    score: float = 0.0
    """The adapter with the lowest score is evicted first."""
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


class EvictionScores:
    """Eviction scores of the adapters of one shard."""

    def __init__(self) -> None:
        self._floor = 0.0

    def of(self, num_uses: int, num_bytes: int) -> float:
        """The score of an adapter at its `num_uses`-th use since it was loaded; 0 at the load itself."""
        return self._floor + (num_uses or EXPECTED_USES) * (num_bytes + FIXED_COST) / max(1, num_bytes)

    def evicted(self, score: float) -> None:
        """Raise the floor to the score of an evicted adapter."""
        self._floor = max(self._floor, score)
