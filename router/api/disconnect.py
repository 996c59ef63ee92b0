"""Detects that a client disconnected: the work inside `async with ClientWatch(receive)` ends with ClientGone.

It reads ASGI's `receive`, so the whole body must have been read before.
"""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


class ClientWatch:
    """Cancels the task that entered it when the client disconnects, and turns that cancellation into ClientGone.

    The watcher can only run while that task waits inside the block, so the cancellation always lands inside the block.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._gone and kind is not None and issubclass(kind, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise ClientGone() from None
