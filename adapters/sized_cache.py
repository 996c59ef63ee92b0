"""A cache that is bounded in bytes and in time. Its entries are data: an exception would hold a request's frames."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

ENTRY_BYTES = 512
"""What an entry takes in addition to its contents: objects, and its place in the dictionary."""


class SizedCache(Generic[K, V]):
    """For one thread or event loop."""

    def __init__(
        self,
        max_bytes: int,
        size: Callable[[K, V], int],
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`size` is how many bytes the contents of an entry take.

        Without `ttl_s`, the least recently used entries leave first, and with it, the oldest ones.
        """
        self._max_bytes, self._size, self._ttl_s, self._clock = max_bytes, size, ttl_s, clock
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterator[tuple[K, V]]:
        """All entries. The cache may be changed meanwhile."""
        return iter([(key, value) for key, (value, _) in self._entries.items()])

    def get(self, key: K) -> V | None:
        """The value of an entry that is not too old."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._ttl_s is None:
            self._entries.move_to_end(key)
        elif self._clock() - entry[1] >= self._ttl_s:
            self.pop(key)
            return None
        return entry[0]

    def put(self, key: K, value: V) -> None:
        """Add or replace an entry. One that is larger than the whole cache is not kept."""
        self.pop(key)
        now = self._clock()
        self._entries[key] = (value, now)
        self.num_bytes += self._size_of(key, value)
        while self._entries and (self.num_bytes > self._max_bytes or self._is_old(now)):
            self.pop(next(iter(self._entries)))

    def pop(self, key: K) -> None:
        """Remove an entry, if there is one."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= self._size_of(key, entry[0])

    def _is_old(self, now: float) -> bool:
        """Whether the first entry is too old."""
        return self._ttl_s is not None and now - self._entries[next(iter(self._entries))][1] >= self._ttl_s

    def _size_of(self, key: K, value: V) -> int:
        return ENTRY_BYTES + self._size(key, value)
