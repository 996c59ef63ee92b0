"""Chooses the shard of a request: the one with its adapter, else with the beginning of its prompt, else with most room.

A pure choice over links. An adapter that no shard has loaded is assigned by a hash, so that routers and restarts agree.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.link import ShardLink, keys_of

OVERFLOW_LOAD = 0.5
"""Another shard takes over requests if it runs less than this fraction of the preferred shard's requests."""
OVERFLOW_REQUESTS = 4
"""It takes over once each preferred shard runs this many requests of the same adapter, or of the base model."""


class Reason(StrEnum):
    """Why a shard was chosen."""

    ONLY_SHARD = "only_shard"
    ADAPTER_RESIDENT = "adapter_resident"
    """The request's adapter is in a slot there."""
    PREFIX_CACHED = "prefix_cached"
    """The beginning of the prompt should be in the cache there."""
    ADAPTER_AFFINITY = "adapter_affinity"
    """No shard has loaded the adapter, which the hash assigns to this one."""
    OVERFLOW = "overflow"
    """The preferred shard has much more load, or no room."""
    LEAST_LOADED = "least_loaded"


Choice = tuple[ShardLink, Reason]


class Placement:
    """Over all shards of one router."""

    def __init__(self, links: Sequence[ShardLink]) -> None:
        self._links = links
        self._rank = lru_cache(maxsize=65_536)(self._ranked)

    def owner(self, digest: str) -> ShardLink | None:
        """The shard that the hash assigns an adapter to, whether it serves now or not."""
        return next(iter(self._rank(digest)), None)

    def home(self, digest: str) -> ShardLink | None:
        """The first of an adapter's shards that is ready, else its owner. None where there is no shard."""
        return next((link for link in self._rank(digest) if link.ready), self.owner(digest))

    def on_membership_change(self) -> None:
        self._rank.cache_clear()

    def choose(self, generation: Generation) -> Choice | None:
        """A shard with room; None where the request must wait for one."""
        num_tokens = generation.num_known
        if len(self._links) == 1:
            (link,) = self._links
            return (link, Reason.ONLY_SHARD) if link.has_room(num_tokens) else None
        open_links = [link for link in self._links if link.has_room(num_tokens)]
        if not open_links:
            return None
        preferred, reason = self._preferred(generation)
        if not preferred:
            return max(open_links, key=_room), Reason.LEAST_LOADED
        busiest = max(len(link.running) for link in preferred)
        idler = [link for link in open_links if link not in preferred and len(link.running) < OVERFLOW_LOAD * busiest]
        with_room = [link for link in preferred if link in open_links]
        key = generation.adapters.affinity_key
        if with_room and not (idler and min(link.num_by_affinity[key] for link in preferred) >= OVERFLOW_REQUESTS):
            return max(with_room, key=_room), reason
        others = open_links if reason is Reason.PREFIX_CACHED else idler  # a cached prefix is not worth waiting for
        return (max(others, key=_room), Reason.OVERFLOW) if others else None

    def record_sent(self, generation: Generation, link: ShardLink) -> None:
        """It was sent to that shard."""
        if len(self._links) > 1:
            link.prefixes.add(self._keys(generation))

    def _preferred(self, generation: Generation) -> tuple[list[ShardLink], Reason]:
        """The shards that have something of the request, and what; none where no shard has."""
        ready = [link for link in self._links if link.ready]
        key = generation.adapters.affinity_key
        reason = Reason.PREFIX_CACHED
        if key:
            holders = [link for link in ready if link.residency.is_resident(key)]
            if not holders:
                return [link for link in (self.home(key),) if link is not None], Reason.ADAPTER_AFFINITY
            if len(holders) == 1:
                return holders, Reason.ADAPTER_RESIDENT
            ready, reason = holders, Reason.ADAPTER_RESIDENT
        keys = self._keys(generation)
        shared = {link: link.prefixes.num_shared(keys) for link in ready} if keys else {}
        most = max(shared.values(), default=0)
        if most:
            return [link for link in ready if shared[link] == most], Reason.PREFIX_CACHED
        return (ready, reason) if key else ([], reason)

    @staticmethod
    def _keys(generation: Generation) -> tuple[int, ...]:
        routing = generation.routing
        if routing.prefix_keys is None:
            request = generation.request
            routing.prefix_keys = keys_of(request.prompt_ids, generation.adapters.prefix_content, request.cache_salt)
        return routing.prefix_keys

    def _ranked(self, digest: str) -> tuple[ShardLink, ...]:
        def weight(link: ShardLink) -> bytes:
            return hashlib.sha256(f"{digest} {link.address}".encode()).digest()

        return tuple(sorted(self._links, key=weight))


def _room(link: ShardLink) -> tuple[int, int]:
    return -len(link.running), link.credit.num_requests
