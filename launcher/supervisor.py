"""The life of a server in named stages: start, wait until ready, watch, drain, end.

Knows processes, signals and the router's `GET /ready`; not what is served.
"""

import http.client
import logging
import math
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from launcher.exits import Exit, LauncherError
from launcher.process import Child

SAME_REQUEST_S = 0.5
"""A signal so soon after another was sent for the same reason: `timeout` and closing terminals send two at once."""
_POLL_S = 0.05
_SHARD_END_S = 10.0
_ROUTER_GRACE_S = 10.0
_LAST_WORDS_S = 2.0


class Stop(Exception):
    """Somebody asked the launcher to end."""


@dataclass(frozen=True)
class Address:
    """Where the router listens, as seen from this machine."""

    host: str
    port: int

    @property
    def reachable_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = self.reachable_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


class Signals:
    """SIGTERM, SIGINT and SIGHUP, in the order of their arrival; those of one moment count once."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._counted_at = -math.inf

    @contextmanager
    def caught(self) -> Iterator["Signals"]:
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup means it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, seconds: float) -> str | None:
        """The name of the next signal, or None after `seconds`."""
        try:
            return signal.Signals(self._arrived.get(timeout=seconds)).name
        except queue.Empty:
            return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._counted_at >= SAME_REQUEST_S:
            self._counted_at = now
            self._arrived.put(number)


class Supervisor:
    """Shards and a router as one server."""

    def __init__(
        self,
        start_shards: Sequence[Callable[[], Child]],
        start_router: Callable[[], Child],
        address: Address,
        drain_timeout_s: float,
        log: logging.Logger,
    ) -> None:
        self._start_shards = start_shards
        self._start_router = start_router
        self._address = address
        self._drain_timeout_s = drain_timeout_s
        self._log = log
        self._shards: list[Child] = []
        self._router: Child | None = None

    def run(self, signals: Signals, when_ready: Callable[[], None]) -> Exit:
        """Serve until a signal or the death of a process. Raises LauncherError for a death; leaves no process."""
        try:
            self._start()
            try:
                self._wait_until_ready(signals)
                when_ready()
                self._watch(signals)
            except Stop as stop:
                self._log.info("%s: ending; running requests have %g seconds", stop, self._drain_timeout_s)
            return self._drain(signals)
        except LauncherError:
            self._give_up()
            raise
        finally:
            for child in self._children():
                child.kill()

    def _start(self) -> None:
        self._shards = [start() for start in self._start_shards]
        self._router = self._start_router()

    def _wait_until_ready(self, signals: Signals) -> None:
        while not self._is_ready():
            self._look(signals, Exit.SHARD_CANNOT_START, Exit.WEBSERVER_CANNOT_START, "before it was ready")

    def _watch(self, signals: Signals) -> None:
        while True:
            self._look(signals, Exit.SHARD_FAILED, Exit.WEBSERVER_FAILED, "while serving")

    def _look(self, signals: Signals, shard: Exit, router: Exit, moment: str) -> None:
        """Wait a moment. Raises Stop for a signal and LauncherError for a death."""
        name = signals.wait(_POLL_S)
        if name is not None:
            raise Stop(name)
        for child in self._children():
            if child.exit_code is not None:
                raise LauncherError(router if child is self._router else shard, f"{child.ending} {moment}")

    def _drain(self, signals: Signals) -> Exit:
        """Router first: it answers what runs, and needs the shards for that."""
        assert self._router is not None
        self._router.terminate()
        end = time.monotonic() + self._drain_timeout_s + _ROUTER_GRACE_S
        while self._router.exit_code is None:
            if signals.wait(_POLL_S) is not None:
                self._log.warning("second signal: ending at once")
                return Exit.FORCED
            if time.monotonic() > end:
                raise LauncherError(Exit.WEBSERVER_FAILED, "the router did not drain in time and was killed")
        for shard in self._shards:
            shard.terminate()
        ended = [shard.wait(_SHARD_END_S) for shard in self._shards]
        if not all(ended):
            self._log.warning("a shard did not end in time and is killed")
        # By SIGTERM itself it ends only before it listens to signals, and then it answers nobody yet.
        if self._router.exit_code not in (0, -signal.SIGTERM):
            raise LauncherError(Exit.WEBSERVER_FAILED, f"{self._router.ending} while draining")
        self._log.info("ended")
        return Exit.OK

    def _give_up(self) -> None:
        """After a death: the others get a moment to tell their clients."""
        for child in self._children():
            child.terminate()
        end = time.monotonic() + _LAST_WORDS_S
        for child in self._children():
            child.wait(max(0.0, end - time.monotonic()))

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self._address.reachable_host, self._address.port, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _children(self) -> list[Child]:
        return [*self._shards, *([self._router] if self._router is not None else [])]
