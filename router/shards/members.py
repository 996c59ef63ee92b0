"""The shards of one router: fixed addresses, those that a DNS name or a file lists, and the choice for a request.

`dns:host:port` stands for every address of the name, `file:/path` for a JSON list of addresses. Both are polled, so
shards join and leave while others serve. A request goes to the shard with its adapter, else with the beginning of its
prompt, else with most room. A hash assigns adapters that no shard has loaded, so that routers and restarts agree.
"""

import asyncio
import hashlib
import json
import socket
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.version import version, versions_compatible
from lorikeet.router.config import RouterConfig
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.link import ShardAccess, ShardLink, keys_of

log = structlog.get_logger()

POLL_SECONDS = 2.0
DNS, FILE = "dns:", "file:"
EQUAL_FIELDS = ("model_id", "dtype", "quantization", "kv_cache_dtype", "num_ranks", "vocab_size", "rotary_factors")
"""Fields of ShardInfo that must be equal for all shards, because any shard may continue a request of another."""


def is_fixed(source: str) -> bool:
    """Whether a source is an address itself."""
    return not source.startswith((DNS, FILE))


class ShardMembers:
    """Keeps a link for every address."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises OSError where a file of the credentials cannot be read."""
        self._config = config
        self._access = ShardAccess.of(config)
        self._num_made = 0
        self.links: list[ShardLink] = []
        """Changed in place, because others hold it."""
        self._empty_sources: set[str] = set()
        """Sources that listed no address at the last poll."""
        for source in filter(is_fixed, config.shard_addresses):
            self._join(source, "")

    @property
    def is_fixed(self) -> bool:
        """Whether the addresses never change."""
        return all(map(is_fixed, self._config.shard_addresses))

    def incompatibility(self, info: pb.ShardInfo) -> str:
        """Why a shard cannot be used, in a sentence; "" if it can."""
        return incompatibility(info, next((link.info for link in self.links if link.client.connected), None))

    async def poll(self) -> tuple[list[ShardLink], list[ShardLink]]:
        """Update the links; returns those that joined and those that left. One that still serves stays, even when its
        address is no longer listed.
        """
        listed: dict[str, str] = {}
        for source in self._config.shard_addresses:
            if is_fixed(source):
                listed[source] = ""
            else:
                addresses = await addresses_of(source)
                self._log_change(source, is_empty=not addresses)
                listed |= addresses
        known = {link.address: link for link in self.links}
        joined = [self._join(address, name) for address, name in listed.items() if address not in known]
        left = [link for address, link in known.items() if address not in listed and not link.client.connected]
        for link in left:
            self.links.remove(link)
        return joined, left

    def _log_change(self, source: str, is_empty: bool) -> None:
        if is_empty != (source in self._empty_sources):
            self._empty_sources ^= {source}
            log.warning("shards_not_found" if is_empty else "shards_found_again", source=source)

    def _join(self, address: str, name: str) -> ShardLink:
        link = ShardLink(self._num_made, address, name, self._access, self._config)
        self._num_made += 1
        self.links.append(link)
        return link


async def addresses_of(source: str) -> dict[str, str]:
    """The addresses that a source lists, each with the name behind it; none where it cannot be looked up."""
    if source.startswith(FILE):
        try:
            listed = json.loads(await asyncio.to_thread(Path(source.removeprefix(FILE)).read_text))
        except (OSError, ValueError):
            return {}
        return {address: "" for address in listed if isinstance(address, str)} if isinstance(listed, list) else {}
    name, _, port = source.removeprefix(DNS).rpartition(":")
    name = name.removeprefix("[").removesuffix("]")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return {}
    hosts = sorted({str(info[4][0]) for info in infos})
    return {f"[{host}]:{port}" if ":" in host else f"{host}:{port}": name for host in hosts}


def incompatibility(info: pb.ShardInfo, known: pb.ShardInfo | None) -> str:
    """Why a shard cannot be used, in a sentence; "" if it can. `known`: of a connected shard, if there is one."""
    if not versions_compatible(info.version, version()):
        return f"the shard's version {info.version} and this router's, {version()}, don't fit together"
    for name in EQUAL_FIELDS if known is not None else ():
        theirs, ours = getattr(info, name), getattr(known, name)
        if theirs != ours:
            return f"its {name} is {theirs or 'none'}, that of the others {ours or 'none'}"
    return ""


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
        """Note that `generation` was sent to the shard of `link`."""
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
