"""The life of a server in named stages: start, wait until ready, watch, drain, end.

Knows processes, signals and the router's `GET /ready`; not what is served.
"""

import http.client
import logging
import math
import queue
import signal
import time
from collections import deque
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
_MOST_LOADER_ENDS = 5
_LOADER_WINDOW_S = 60.0


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

    def is_ready(self) -> bool:
        """Whether the server there takes requests."""
        connection = http.client.HTTPConnection(self.reachable_host, self.port, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Signals:
    """SIGTERM, SIGINT and SIGHUP, in the order of their arrival; those of one moment count once."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._counted_at = -math.inf
        self.reloads = False
        """SIGHUP asks for the operator's files to be read again, not for an end."""
        self._hangups = 0
        self._outlives_terminal = False

    def take_hangups(self) -> int:
        """How many SIGHUPs came that ask for a reload, since last asked."""
        taken, self._hangups = self._hangups, 0
        return taken

    @contextmanager
    def caught(self) -> Iterator["Signals"]:
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup means it
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
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
        if number == signal.SIGHUP and self.reloads:
            self._hangups += 1
            return
        if number == signal.SIGHUP and self._outlives_terminal:
            return
        if now - self._counted_at >= SAME_REQUEST_S:
            self._counted_at = now
            self._arrived.put(number)


@dataclass(frozen=True)
class Processes:
    """How each process of a server is started."""

    shards: Sequence[Callable[[], Child]]
    router: Callable[[], Child]
    loader: Callable[[], Child] | None = None
    """Of adapters. Whatever an adapter did to it, it is started again: only what was being loaded is lost."""


class Supervisor:
    """Shards, a loader and a router as one server."""

    def __init__(self, processes: Processes, address: Address, drain_timeout_s: float, log: logging.Logger) -> None:
        self._processes = processes
        self._address = address
        self._drain_timeout_s = drain_timeout_s
        self._log = log
        self._shards: list[Child] = []
        self._router: Child | None = None
        self._loader: Child | None = None
        self._loader_ends: deque[float] = deque(maxlen=_MOST_LOADER_ENDS)

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
        self._shards = [start() for start in self._processes.shards]
        if self._processes.loader is not None:
            self._loader = self._processes.loader()
        self._router = self._processes.router()

    def _wait_until_ready(self, signals: Signals) -> None:
        while not self._address.is_ready():
            self._look(signals, Exit.SHARD_CANNOT_START, Exit.WEBSERVER_CANNOT_START, "before it was ready")
            if self._loader is not None and self._loader.exit_code is not None:
                raise LauncherError(Exit.LOADER_FAILED, f"{self._loader.ending} before the server was ready")

    def _watch(self, signals: Signals) -> None:
        while True:
            self._look(signals, Exit.SHARD_FAILED, Exit.WEBSERVER_FAILED, "while serving")
            self._replace_loader()

    def _look(self, signals: Signals, shard: Exit, router: Exit, moment: str) -> None:
        """Wait a moment. Raises Stop for a signal and LauncherError for a death."""
        name = signals.wait(_POLL_S)
        if name is not None:
            raise Stop(name)
        if signals.take_hangups() and self._router is not None:
            self._log.info("SIGHUP: the router reads its files again")
            self._router.hang_up()
        for child in [*self._shards, *filter(None, [self._router])]:
            if child.exit_code is not None:
                raise LauncherError(router if child is self._router else shard, f"{child.ending} {moment}")

    def _replace_loader(self) -> None:
        """Raises LauncherError where that was done too often lately."""
        if self._loader is None or self._loader.exit_code is None:
            return
        now = time.monotonic()
        if len(self._loader_ends) == _MOST_LOADER_ENDS and now - self._loader_ends[0] < _LOADER_WINDOW_S:
            raise LauncherError(Exit.LOADER_FAILED, f"{self._loader.ending} again and again while serving")
        self._loader_ends.append(now)
        self._log.error("%s: starting another one", self._loader.ending)
        self._loader.kill()
        assert self._processes.loader is not None
        self._loader = self._processes.loader()

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
        others = [*self._shards, *filter(None, [self._loader])]
        for child in others:
            child.terminate()
        ended = [child.wait(_SHARD_END_S) for child in others]
        if not all(ended):
            self._log.warning("a shard or the loader did not end in time and is killed")
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

    def _children(self) -> list[Child]:
        return [*self._shards, *filter(None, [self._loader, self._router])]
