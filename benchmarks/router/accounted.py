"""A router that counts what being observed costs it, in processor time of its event loop's thread.

Counted are the task that makes snapshots of the live view, each step of the tasks that send them, and the calls of
traces. The event loop writes to sockets after these steps, so a write of each snapshot is measured on a connection of
its own, and counts once for each viewer. Reading the clock counts as well.

    python -m benchmarks.router.accounted CONFIG.json ACCOUNT
"""

import functools
import mmap
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from benchmarks.evidence import arguments
from lorikeet.router.__main__ import main
from lorikeet.router.api.routes.live import LiveRoutes
from lorikeet.router.live.live import Live
from lorikeet.router.tracing.tracing import RequestTrace, Tracing

FIELDS = ("live_s", "snapshots", "viewer_snapshots", "traces_s", "decisions")
_FORMAT = struct.Struct(f"{len(FIELDS)}d")
Patch = Callable[[object, str, object], None]


class Account:
    """Sums in a file that two processes map: the router adds, another one reads."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self._sums = self.read()

    def add(self, field: str, amount: float) -> None:
        self._sums[field] += amount
        _FORMAT.pack_into(self._memory, 0, *self._sums.values())

    def read(self) -> dict[str, float]:
        return dict(zip(FIELDS, _FORMAT.unpack_from(self._memory), strict=True))

    def timed(self, field: str, call: Callable[..., Any], count: str = "") -> Callable[..., Any]:
        """The same function, whose processor time is added to `field`, and its calls to `count`."""

        @functools.wraps(call)
        def timed(*arguments: Any) -> Any:
            before = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.add(field, time.thread_time() - before)
                if count:
                    self.add(count, 1)

        return timed


class Steps(Awaitable[Any]):
    """A coroutine whose processor time is added to a field: that of its steps, not of what runs in between."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], account: Account, field: str) -> None:
        self._coroutine = coroutine
        self._send = account.timed(field, coroutine.send)
        self._throw = account.timed(field, coroutine.throw)

    def __await__(self) -> Generator[Any, Any, Any]:
        step, argument = self._send, None
        while True:
            try:
                waits_for = step(argument)
            except StopIteration as stop:
                return stop.value
            try:
                step, argument = self._send, (yield waits_for)
            except BaseException as error:  # a cancellation, for the coroutine to handle
                step, argument = self._throw, error


class Write:
    """A write of a snapshot to a viewer: one over TCP on the loopback interface, which is read at once."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._sender = socket.create_connection(server.getsockname())
            self._receiver, _ = server.accept()

    def __call__(self, data: bytes) -> float:
        """Its processor time in seconds."""
        before = time.thread_time()
        self._sender.sendall(data)
        spent = time.thread_time() - before
        num_left = len(data)
        while num_left:
            num_left -= len(self._receiver.recv(num_left))
        return spent

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


def install(account: Account, patch: Patch = setattr) -> Write:
    """Count from now on, in routers that are made later. The result is to be closed at the end."""
    write = Write()
    make, run, watch = Live._make, Live._run, LiveRoutes.watch

    def made(self: Live, waiting: Any) -> None:
        make(self, waiting)
        account.add("snapshots", 1)
        account.add("viewer_snapshots", self._num_viewers)
        account.add("live_s", self._num_viewers * write(waiting.result()))

    async def running(self: Live) -> None:
        await Steps(run(self), account, "live_s")

    async def watched(self: LiveRoutes, request: Request) -> Any:
        response: Response = await watch(self, request)

        async def send_all(scope: Scope, receive: Receive, send: Send) -> None:
            await Steps(response(scope, receive, send), account, "live_s")

        return send_all

    patch(Live, "_make", made)
    patch(Live, "_run", running)
    patch(LiveRoutes, "watch", watched)
    patch(Tracing, "begin", account.timed("traces_s", Tracing.begin, "decisions"))
    patch(RequestTrace, "end", account.timed("traces_s", RequestTrace.end))
    return write


if __name__ == "__main__":
    parser = arguments.parser(__doc__)
    parser.add_argument("configuration", metavar="CONFIG.json")
    parser.add_argument("account", type=Path, metavar="ACCOUNT", help="the file of the sums")
    given = parser.parse_args()
    install(Account(given.account))
    sys.exit(main(given.configuration))
