"""Snapshots for all viewers: one per interval while anybody watches, encoded once."""

import asyncio
from collections.abc import AsyncGenerator, Iterable

import orjson

from lorikeet.router.live.snapshot import SnapshotMaker
from lorikeet.router.shards.link import ShardLink

INTERVAL_S = 0.5
WATCH_MS = 4000
"""For so long shards are asked to describe steps, and asked again at half of it."""


class Live:
    """Live snapshots of one router. Without viewers it does nothing."""

    def __init__(self, maker: SnapshotMaker, links: Iterable[ShardLink], interval_s: float = INTERVAL_S) -> None:
        self._maker = maker
        self._links = links
        self._interval_s = interval_s
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None
        self.num_made = 0
        """Snapshots since the start."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each a snapshot, until the reader leaves."""
        self._num_viewers += 1
        try:
            while True:
                if self._next is None:
                    self._next = asyncio.get_running_loop().create_future()
                if self._task is None:
                    self._task = asyncio.create_task(self._run())
                yield await asyncio.shield(self._next)
        finally:
            self._num_viewers -= 1

    async def _run(self) -> None:
        """Make snapshots until nobody watches."""
        num_since = 0
        try:
            while self._num_viewers:
                if num_since % max(1, int(WATCH_MS / 2000 / self._interval_s)) == 0:
                    for link in self._links:
                        link.watch(WATCH_MS)
                num_since += 1
                waiting, self._next = self._next, None
                if waiting is not None:
                    self._make(waiting)
                await asyncio.sleep(self._interval_s)
        finally:
            self._task = None

    def _make(self, waiting: "asyncio.Future[bytes]") -> None:
        """Viewers get an error where it fails."""
        self.num_made += 1
        try:
            waiting.set_result(b"data: " + orjson.dumps(self._maker.make()) + b"\n\n")
        except Exception as error:
            waiting.set_exception(error)
