"""The life of a server in named stages: start, wait until ready, watch, drain, end.

Knows processes, signals and the router's `GET /ready`; not what is served.
"""

import http.client
import logging
import math
import queue
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.processes.process import Child
from lorikeet.launcher.processes.restart_policy import Marks, SupervisedHelper, SupervisedShard

SAME_REQUEST_S = 0.5
"""A signal so soon after another was sent for the same reason: `timeout` and closing terminals send two at once."""
_POLL_S = 0.05
_SHARD_END_S = 10.0
_REPLACED_S = 1800.0
"""So long a new shard may load its model."""
_ROUTER_GRACE_S = 10.0
FLUSH_TIMEOUT_S = 2.0
_MEANT = (None, 0, -signal.SIGTERM)
"""Exit codes of who ends as it was asked to: by SIGTERM itself only before it listens, and then it does nothing yet."""


class Stop(Exception):
    """Somebody asked the launcher to end."""


class Forced(Exception):
    """Somebody asked again."""


@dataclass(frozen=True)
class Address:
    """Where something listens, as seen from this machine."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of `host:port`, an IPv6 host in brackets."""
        host, _, port = text.rpartition(":")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

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
    """SIGTERM, SIGINT and SIGHUP, in the order of their arrival; those of one moment count once. SIGUSR2 asks for new
    processes.
    """

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._counted_at = -math.inf
        self.reloads = False
        """SIGHUP asks for the operator's files to be read again, not for an end."""
        self._asked: Counter[int] = Counter()
        self._outlives_terminal = False

    def take(self, number: int) -> int:
        """How often something other than an end was asked for by that signal, since last asked."""
        return self._asked.pop(number, 0)

    @contextmanager
    def caught(self) -> Iterator["Signals"]:
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup means it
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
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
        if number == signal.SIGUSR2 or (number == signal.SIGHUP and self.reloads):
            self._asked[number] += 1
            return
        if number == signal.SIGHUP and self._outlives_terminal:
            return
        if now - self._counted_at >= SAME_REQUEST_S:
            self._counted_at = now
            self._arrived.put(number)


@dataclass(frozen=True)
class ShardStart:
    """How a shard is started, and the files that tell of it."""

    start: Callable[[], Child]
    marks: Marks


@dataclass(frozen=True)
class Processes:
    """How each process of a server is started. One that ends while serving is started again."""

    shards: Sequence[ShardStart]
    """What they computed goes on elsewhere, or there once they are back."""
    router: Callable[[], Child] | None = None
    """Its connections are lost with it. None where shards serve routers that run elsewhere."""
    router_ready: Path | None = None
    """A file that it makes when requests are welcome, and …"""
    router_beside: Path | None = None
    """… one that is there while it takes another router's place: it listens when it is ready then."""
    loader: Callable[[], Child] | None = None
    """Of adapters. Only what was being loaded is lost."""


class Supervisor:
    """Shards, a loader and a router as one server."""

    def __init__(
        self, processes: Processes, is_ready: Callable[[], bool], drain_timeout_s: float, log: logging.Logger
    ) -> None:
        self._processes = processes
        self._is_ready = is_ready
        self._drain_timeout_s = drain_timeout_s
        self._log = log
        self._shards: list[SupervisedShard] = []
        self._router: SupervisedHelper | None = None
        self._loader: SupervisedHelper | None = None
        self._leaving: list[Child] = []
        """Processes that finish what they have beside their successors."""

    def run(self, signals: Signals, when_ready: Callable[[], None]) -> Exit:
        """Serve until a signal. Raises LauncherError where a process cannot be had, or ends too often; leaves none."""
        try:
            self._start()
            try:
                self._wait_until_ready(signals)
                when_ready()
                self._watch(signals)
            except Stop as stop:
                self._log.info("%s: ending; running requests have %g seconds", stop, self._drain_timeout_s)
            return self._drain(signals)
        except Forced:
            self._log.warning("second signal: ending at once")
            return Exit.FORCED
        except LauncherError:
            self._give_up()
            raise
        finally:
            for child in self._children():
                child.kill()

    def _start(self) -> None:
        for shard in self._processes.shards:
            self._shards.append(SupervisedShard(shard.start, shard.marks, self._log))
        if self._processes.loader is not None:
            self._loader = SupervisedHelper(self._processes.loader, Exit.LOADER_FAILED, self._log)
        if self._processes.router is not None:
            self._router = SupervisedHelper(self._processes.router, Exit.WEBSERVER_FAILED, self._log)

    def _wait_until_ready(self, signals: Signals) -> None:
        exits = [(child, Exit.SHARD_CANNOT_START) for child in (shard.child for shard in self._shards)]
        if self._loader is not None:
            exits.append((self._loader.child, Exit.LOADER_FAILED))
        if self._router is not None:
            exits.append((self._router.child, Exit.WEBSERVER_CANNOT_START))
        while not self._is_ready():
            self._listen(signals)
            for child, exit in exits:
                if child.exit_code is not None:
                    raise LauncherError(exit, f"{child.ending} before the server was ready")

    def _watch(self, signals: Signals) -> None:
        while True:
            self._look(signals)
            if signals.take(signal.SIGUSR2):
                self._replace_all(signals)

    def _look(self, signals: Signals, untried: SupervisedHelper | None = None) -> None:
        """Look after everything but a helper that has yet to show whether it can be started at all."""
        self._listen(signals)
        for kept in (*self._shards, self._loader, self._router):
            if kept is not None and kept is not untried:
                kept.look()

    def _replace_all(self, signals: Signals) -> None:
        """Every process by a new one, while the server serves: shards one after the other, then the router."""
        self._log.info("SIGUSR2: every process is replaced")
        for shard in self._shards:
            shard.replace()
            if not self._until(lambda shard=shard: shard.is_ready, signals, ending=shard.child):  # type: ignore[misc]
                self._log.error("%s has not come back: nothing else is replaced", shard.child.name)
                return
        if self._loader is not None:
            self._end_beside(self._loader.replace(), signals)
        if self._router is None or self._replace_router(self._router, signals):
            self._log.info("every process was replaced")

    def _replace_router(self, router: SupervisedHelper, signals: Signals) -> bool:
        """Both are there until the new one is ready."""
        ready, beside = self._processes.router_ready, self._processes.router_beside
        assert ready is not None and beside is not None
        ready.unlink(missing_ok=True)
        beside.touch()
        old = router.replace()
        self._leaving.append(old)
        has_ended = lambda: router.child.exit_code is not None
        self._until(lambda: ready.exists() or has_ended(), signals, untried=router)
        beside.unlink()
        if has_ended() or not ready.exists():
            self._log.error("the new router cannot serve (%s): the old one goes on", router.child.ending)
            self._leaving.remove(old)
            router.take_back(old)
            return False
        old.hand_over()
        self._end_beside(old, signals)
        return True

    def _until(
        self,
        is_so: Callable[[], bool],
        signals: Signals,
        ending: Child | None = None,
        untried: SupervisedHelper | None = None,
    ) -> bool:
        """Look after everything until it is so; False where that takes too long. `ending` is killed if it does not end
        in time, and then there is time again for its successor.
        """
        end = time.monotonic() + self._drain_timeout_s + _SHARD_END_S
        while not is_so():
            if time.monotonic() > end:
                if ending is None or ending.exit_code is not None:
                    return False
                ending.kill()
                ending, end = None, time.monotonic() + _REPLACED_S
            elif ending is not None and ending.exit_code is not None:
                ending, end = None, time.monotonic() + _REPLACED_S
            self._look(signals, untried)
        return True

    def _end_beside(self, old: Child, signals: Signals) -> None:
        """Let a process that has a successor end; it is killed if it takes too long."""
        if old not in self._leaving:
            self._leaving.append(old)
            old.terminate()
        if not self._until(lambda: old.exit_code is not None, signals):
            self._log.warning("%s did not end in time and is killed", old.name)
        old.kill()
        self._leaving.remove(old)

    def _listen(self, signals: Signals) -> None:
        """Wait a moment. Raises Stop for a signal."""
        name = signals.wait(_POLL_S)
        if name is not None:
            raise Stop(name)
        if signals.take(signal.SIGHUP) and self._router is not None:
            self._log.info("SIGHUP: the router reads its files again")
            self._router.child.hang_up()

    def _drain(self, signals: Signals) -> Exit:
        """Router first: it answers what runs, and needs the shards for that."""
        gone: list[str] = []
        if self._router is not None:
            self._end([self._router.child], self._drain_timeout_s + _ROUTER_GRACE_S, signals)
            router = self._router.child
            if router.exit_code not in _MEANT:
                raise LauncherError(Exit.WEBSERVER_FAILED, f"{router.ending} while draining")
            if router.exit_code is None:
                raise LauncherError(Exit.WEBSERVER_FAILED, "the router did not drain in time and was killed")
            gone = [shard.child.ending for shard in self._shards if shard.child.exit_code not in _MEANT]
        # Without a router here, the shards finish what routers elsewhere have given them.
        timeout_s = _SHARD_END_S if self._router is not None else self._drain_timeout_s + _SHARD_END_S
        others = [child for child in self._children() if self._router is None or child is not self._router.child]
        self._end(others, timeout_s, signals)
        if any(child.exit_code is None for child in others):
            self._log.warning("a shard or the loader did not end in time and is killed")
        if gone:
            raise LauncherError(Exit.SHARD_FAILED, f"{gone[0]} before the router had drained")
        self._log.info("ended")
        return Exit.OK

    def _end(self, children: Sequence[Child], timeout_s: float, signals: Signals) -> None:
        """Ask them to end, and wait. Raises Forced at a signal."""
        for child in children:
            child.terminate()
        end = time.monotonic() + timeout_s
        while any(child.exit_code is None for child in children) and time.monotonic() < end:
            if signals.wait(_POLL_S) is not None:
                raise Forced

    def _give_up(self) -> None:
        """After a death: the others get a moment to tell their clients."""
        for child in self._children():
            child.terminate()
        end = time.monotonic() + FLUSH_TIMEOUT_S
        for child in self._children():
            child.wait(max(0.0, end - time.monotonic()))

    def _children(self) -> list[Child]:
        shards = [shard.child for shard in self._shards]
        helpers = [helper.child for helper in (self._loader, self._router) if helper is not None]
        return [*shards, *helpers, *self._leaving]
