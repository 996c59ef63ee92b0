"""A router with a scripted shard in a thread of its own, for tests whose own code blocks."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from tests.router.serving import Serving, serving


class ThreadedServing:
    """Serves while the block runs."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self._folder, self._fields = folder, fields
        self._ready, self.ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._loop: asyncio.AbstractEventLoop
        self.serving: Serving

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._thread.join()

    @property
    def url(self) -> str:
        return self.serving.url

    def call(self, act: Callable[[], None]) -> None:
        """Run `act` in the server's thread."""

        async def run() -> None:
            act()

        self.start(run()).result(30)

    def start(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run `work` in the server's thread, without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin(self) -> None:
        """In the server's thread, before the first request."""

    async def run(self) -> None:
        """In the server's thread, until `ended`."""
        await asyncio.to_thread(self.ended.wait)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with serving(self._folder, **self._fields) as self.serving:
            self.begin()
            self._ready.set()
            await self.run()
