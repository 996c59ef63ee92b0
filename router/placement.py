"""Which shard a request goes to: where its adapter is, else where the adapter belongs, else where most room is.

A pure choice over links. An adapter belongs to one shard by a hash, so that routers and restarts agree on it.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from router.shard_link import ShardLink

SPILL = 0.5
"""Where an adapter's shard is full, another takes it on if it runs less than this share of what runs there."""


class Placement:
    """Over all shards of one router."""

    def __init__(self, links: Sequence[ShardLink]) -> None:
        self._links = links
        self._rank = lru_cache(maxsize=65_536)(self._ranked)

    def owner(self, digest: str) -> ShardLink:
        """Where an adapter belongs, whether that shard serves now or not."""
        return self._rank(digest)[0]

    def home(self, digest: str) -> ShardLink:
        """Where an adapter belongs: the first of its shards that serves, or would."""
        order = self._rank(digest)
        return next((link for link in order if link.ready), order[0])

    def choose(self, digest: str, num_tokens: int) -> ShardLink | None:
        """A shard with room; None where the request must wait for one. An empty digest is the base model."""
        if len(self._links) == 1:
            (link,) = self._links
            return link if link.has_room(num_tokens) else None
        open_links = [link for link in self._links if link.has_room(num_tokens)]
        if not digest:
            return max(open_links, key=_room, default=None)
        holders = [link for link in self._links if link.ready and link.residency.is_resident(digest)]
        holders = holders or [self.home(digest)]
        with_room = [link for link in holders if link in open_links]
        if with_room:
            return max(with_room, key=_room)
        busiest = max(len(link.running) for link in holders)
        return max((link for link in open_links if len(link.running) < SPILL * busiest), key=_room, default=None)

    def _ranked(self, digest: str) -> tuple[ShardLink, ...]:
        def weight(link: ShardLink) -> bytes:
            return hashlib.sha256(f"{digest} {link.address}".encode()).digest()

        return tuple(sorted(self._links, key=weight))


def _room(link: ShardLink) -> tuple[int, int]:
    return -len(link.running), link.credit.num_requests
