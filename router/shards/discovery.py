"""The shards of one router: fixed addresses, and those that a DNS name or a file currently lists.

`dns:host:port` stands for every address of the name, `file:/path` for a JSON list of addresses. Both are polled, so
shards join and leave while others serve.
"""

import asyncio
import json
import socket
from pathlib import Path

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.version import version, versions_compatible
from lorikeet.router.config import RouterConfig
from lorikeet.router.shards.client import ShardAccess
from lorikeet.router.shards.link import ShardLink

log = structlog.get_logger()

POLL_SECONDS = 2.0
DNS, FILE = "dns:", "file:"
EQUAL_FIELDS = ("model_id", "dtype", "quantization", "kv_cache_dtype", "num_ranks", "vocab_size", "rotary_factors")
"""Fields of ShardInfo that must be equal for all shards, because any shard may continue a request of another."""


def is_fixed(source: str) -> bool:
    """Whether a source is an address itself."""
    return not source.startswith((DNS, FILE))


class Members:
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
        return {each: "" for each in listed if isinstance(each, str)} if isinstance(listed, list) else {}
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
