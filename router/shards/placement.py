"""Which shard a request goes to: where its adapter is, else where the beginning of its prompt is, else where room is.

A pure choice over links. An adapter that no shard holds belongs to one by a hash, so that routers and restarts agree.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.connection import ShardLink
from lorikeet.router.shards.prefix_affinity import keys_of

SPILL = 0.5
"""Beside a busy shard another takes requests on if it runs less than this share of what runs there …"""
HOT = 4
"""… once so many of the same adapter, or of the base, run where they belong."""


class Reason(StrEnum):
    """Why a request went where it went."""

    ONLY = "only"
    """There is one shard."""
    ADAPTER = "adapter"
    """Its adapter is in a slot there."""
    PREFIX = "prefix"
    """The beginning of its prompt should be cached there."""
    HOME = "home"
    """No shard holds its adapter, which belongs there."""
    SPREAD = "spread"
    """Where it belongs there is much more to do, or no room."""
    CREDIT = "credit"
    """Most room is there."""


Choice = tuple[ShardLink, Reason]


class Placement:
    """Over all shards of one router."""

    def __init__(self, links: Sequence[ShardLink]) -> None:
        self._links = links
        self._rank = lru_cache(maxsize=65_536)(self._ranked)

    def owner(self, digest: str) -> ShardLink | None:
        """Where an adapter belongs, whether that shard serves now or not."""
        return next(iter(self._rank(digest)), None)

    def home(self, digest: str) -> ShardLink | None:
        """Where an adapter belongs: the first of its shards that serves, or would. None where there is no shard."""
        order = self._rank(digest)
        return next((link for link in order if link.ready), next(iter(order), None))

    def changed(self) -> None:
        """Shards have joined or left."""
        self._rank.cache_clear()

    def choose(self, generation: Generation) -> Choice | None:
        """A shard with room; None where the request must wait for one."""
        num_tokens = generation.num_known
        if len(self._links) == 1:
            (link,) = self._links
            return (link, Reason.ONLY) if link.has_room(num_tokens) else None
        open_links = [link for link in self._links if link.has_room(num_tokens)]
        if not open_links:
            return None
        wanted, reason = self._wanted(generation)
        if not wanted:
            return max(open_links, key=_room), Reason.CREDIT
        busiest = max(len(link.running) for link in wanted)
        idler = [link for link in open_links if link not in wanted and len(link.running) < SPILL * busiest]
        with_room = [link for link in wanted if link in open_links]
        digest = generation.contents.home
        if with_room and not (idler and min(link.num_of[digest] for link in wanted) >= HOT):
            return max(with_room, key=_room), reason
        others = open_links if reason is Reason.PREFIX else idler  # a prefix is not worth a wait
        return (max(others, key=_room), Reason.SPREAD) if others else None

    def sent(self, generation: Generation, link: ShardLink) -> None:
        """It left for that shard."""
        if len(self._links) > 1:
            link.prefixes.sent(self._keys(generation))

    def _wanted(self, generation: Generation) -> tuple[list[ShardLink], Reason]:
        """Where it would be at home, and why; nowhere in particular where nothing of it is anywhere."""
        ready = [link for link in self._links if link.ready]
        digest = generation.contents.home
        reason = Reason.PREFIX
        if digest:
            holders = [link for link in ready if link.residency.is_resident(digest)]
            if not holders:
                return [link for link in (self.home(digest),) if link is not None], Reason.HOME
            if len(holders) == 1:
                return holders, Reason.ADAPTER
            ready, reason = holders, Reason.ADAPTER
        keys = self._keys(generation)
        shared = {link: link.prefixes.num_shared(keys) for link in ready} if keys else {}
        most = max(shared.values(), default=0)
        if most:
            return [link for link in ready if shared[link] == most], Reason.PREFIX
        return (ready, reason) if digest else ([], reason)

    @staticmethod
    def _keys(generation: Generation) -> tuple[int, ...]:
        if generation.prefix_keys is None:
            request, contents = generation.request, generation.contents
            generation.prefix_keys = keys_of(request.prompt_ids, contents.digest, request.cache_salt)
        return generation.prefix_keys

    def _ranked(self, digest: str) -> tuple[ShardLink, ...]:
        def weight(link: ShardLink) -> bytes:
            return hashlib.sha256(f"{digest} {link.address}".encode()).digest()

        return tuple(sorted(self._links, key=weight))


def _room(link: ShardLink) -> tuple[int, int]:
    return -len(link.running), link.credit.num_requests
