"""The shards of one router: those with an address, and those that a name or a file stands for just now.

`dns:host:port` is every address that the name has, `file:/path` a JSON list of addresses. Both are looked at again and
again, so shards join and leave while others serve. Nothing here decides who is a member.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from lorikeet.router.shards.connection import ShardLink

log = structlog.get_logger()

LOOK_SECONDS = 2.0
DNS, FILE = "dns:", "file:"


def is_fixed(source: str) -> bool:
    """Whether a source is an address, rather than something that stands for addresses."""
    return not source.startswith((DNS, FILE))


class Members:
    """Keeps a link, and the task that keeps its stream, for every address."""

    def __init__(
        self, sources: Iterable[str], make: Callable[[int, str, str], ShardLink], changed: Callable[[], None]
    ) -> None:
        """`make` gets a number, an address and the name that it stands for; `changed` is called after each change."""
        self._sources = tuple(sources)
        self._make = make
        self._changed = changed
        self._num_made = 0
        self.links: list[ShardLink] = []
        """Changed in place: others may hold it."""
        self._unfound: set[str] = set()
        """Sources that stood for nothing when they were last looked at."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        for source in filter(is_fixed, self._sources):
            self._join(source, "")

    def start(self) -> None:
        """Begin to connect and to look; returns at once."""
        for link in self.links:
            self._run(link)
        if not all(map(is_fixed, self._sources)):
            self._looking = asyncio.create_task(self._look_again_and_again(), name="members")

    async def stop(self) -> None:
        """End every stream."""
        tasks = [*self._tasks.values(), *filter(None, [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_again_and_again(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Bring the links up to date. One that still serves stays, whatever is said of its address."""
        found: dict[str, str] = {}
        for source in self._sources:
            if is_fixed(source):
                found[source] = ""
            else:
                addresses = await addresses_of(source)
                self._note(source, bool(addresses))
                found |= addresses
        known = {link.address: link for link in self.links}
        joined = [address for address in found if address not in known]
        for address in joined:
            self._run(self._join(address, found[address]))
        left = [link for address, link in known.items() if address not in found and not link.client.connected]
        for link in left:
            await self._leave(link)
        if joined or left:
            self._changed()

    def _note(self, source: str, is_found: bool) -> None:
        """Say when a source begins to stand for nothing, and when that is over."""
        if is_found == (source in self._unfound):
            (self._unfound.discard if is_found else self._unfound.add)(source)
            log.warning("shards_not_found" if not is_found else "shards_found_again", source=source)

    def _join(self, address: str, name: str) -> ShardLink:
        link = self._make(self._num_made, address, name)
        self._num_made += 1
        self.links.append(link)
        return link

    def _run(self, link: ShardLink) -> None:
        self._tasks[link.address] = asyncio.create_task(link.client.run(), name=f"shard {link.index}")

    async def _leave(self, link: ShardLink) -> None:
        self.links.remove(link)
        task = self._tasks.pop(link.address)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        log.info("shard_left", address=link.address)


async def addresses_of(source: str) -> dict[str, str]:
    """What a source stands for now: the name behind each address. None where it cannot be looked up."""
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
    except (OSError, UnicodeError):  # the second for what can be no name
        return {}
    hosts = sorted({str(info[4][0]) for info in infos})
    return {f"[{host}]:{port}" if ":" in host else f"{host}:{port}": name for host in hosts}
