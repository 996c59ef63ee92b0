"""Counts the uses of adapters, so that a shard that was replaced loads the most used ones before requests need them."""

import time
from collections.abc import Callable
from math import log2

from lorikeet.proto import shard_pb2 as pb

HALF_LIFE_S = 600.0
"""A use counts half as much after so long."""
MOST_KNOWN = 4096
"""Above twice this number of adapters, only the most used ones are kept."""


class Popularity:
    """Decayed counts of uses by digest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._scores: dict[str, float] = {}
        """By digest: log2 of the count, relative to a decay that began at the clock's zero."""
        self._pins: dict[str, tuple[pb.AdapterPin, str]] = {}

    def add(self, pin: pb.AdapterPin, affinity_key: str) -> None:
        """One more use. `affinity_key` decides the shard that holds the content."""
        now = self._clock() / HALF_LIFE_S
        score = self._scores.get(pin.digest, float("-inf"))
        # log2(2^score + 2^now), which never overflows
        larger, smaller = max(score, now), min(score, now)
        self._scores[pin.digest] = larger + log2(1.0 + 2.0 ** (smaller - larger))
        self._pins[pin.digest] = pin, affinity_key
        if len(self._scores) > 2 * MOST_KNOWN:
            for digest in sorted(self._scores, key=self._scores.__getitem__)[:-MOST_KNOWN]:
                self.remove(digest)

    def remove(self, digest: str) -> None:
        """The content is no longer served."""
        self._scores.pop(digest, None)
        self._pins.pop(digest, None)

    def most_used(self) -> list[tuple[pb.AdapterPin, str]]:
        """All contents with their affinity keys, the most used first."""
        return [self._pins[digest] for digest in sorted(self._scores, key=self._scores.__getitem__, reverse=True)]
