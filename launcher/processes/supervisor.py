"""Supervises the processes of a server: start, wait until ready, restart what exits, replace, drain, end.

A child that exits is restarted with a delay, until it exits too often. Files signal a shard's state.
"""

import http.client
import logging
import math
import signal
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.proto.children import Child
from lorikeet.proto.preload import Preload, reap_adopted

MAX_EXITS = 5
DELAYS = (0.0, 0.5, 1.0, 2.0)
"""Seconds before the next start, by the number of consecutive exits."""
WINDOW_S = 60.0


@dataclass(frozen=True)
class ShardFiles:
    """Files that signal a shard's state by their existence."""

    served: Path
    """Created by the shard: it has completed a request."""
    stuck: Path
    """Created by the router: the shard hangs."""
    ready: Path
    """Created by the shard: it is ready."""

    def clear(self) -> None:
        for path in (self.served, self.stuck, self.ready):
            path.unlink(missing_ok=True)


class SupervisedShard:
    """A shard that is restarted. Only consecutive exits without a completed request count."""

    def __init__(self, start: Callable[[], Child], files: ShardFiles, log: logging.Logger) -> None:
        self._start = start
        self._files = files
        self._log = log
        self._num_exits = 0
        self._start_at = 0.0
        self._is_replaced = False
        self.child = self._started()

    @property
    def is_ready(self) -> bool:
        """Whether it accepts requests."""
        return self.child.exit_code is None and self._files.ready.exists()

    def replace(self) -> None:
        """Ask it to finish its requests and exit; a new one is started then."""
        self._is_replaced = True
        self._files.ready.unlink(missing_ok=True)
        self.child.terminate()

    def check(self) -> None:
        """Restart it if it exited or hangs; called periodically. Raises LauncherError after too many exits."""
        if self._files.stuck.exists() and self.child.exit_code is None:
            self._log.error("process_hung: %s hung; killing it", self.child.name)
            self.child.kill()
        if self.child.exit_code is None:
            return
        if self._is_replaced:
            self._is_replaced = False
        elif not self._start_at:
            self._count_exit()
        if time.monotonic() >= self._start_at:
            self.child = self._started()

    def _count_exit(self) -> None:
        self.child.kill()  # and its own children
        self._num_exits = 1 if self._files.served.exists() else self._num_exits + 1
        if self._num_exits >= MAX_EXITS:
            sentence = f"{self.child.ending}, the {MAX_EXITS}th time in a row without completing a request"
            raise LauncherError(Exit.SHARD_KEEPS_ENDING, sentence)
        delay = DELAYS[min(self._num_exits, len(DELAYS)) - 1]
        self._start_at = time.monotonic() + delay
        self._log.error("process_ended: %s: restarting it%s", self.child.ending, f" in {delay:g} s" if delay else "")

    def _started(self) -> Child:
        self._start_at = 0.0
        self._files.clear()
        return self._start()


class SupervisedHelper:
    """A loader or a router that is restarted, unless it exits too often within `WINDOW_S`."""

    def __init__(self, start: Callable[[], Child], exit: Exit, log: logging.Logger) -> None:
        self._start = start
        self._exit = exit
        self._log = log
        self._exited_at: deque[float] = deque(maxlen=MAX_EXITS)
        self.child = start()

    def check(self) -> None:
        """Restart it if it exited or hangs; called periodically. Raises LauncherError after too many exits."""
        if self.child.exit_code is None:
            return
        now = time.monotonic()
        if len(self._exited_at) == MAX_EXITS and now - self._exited_at[0] < WINDOW_S:
            raise LauncherError(self._exit, f"{self.child.ending} repeatedly while serving")
        self._exited_at.append(now)
        self._log.error("process_ended: %s: restarting it", self.child.ending)
        self.replace().kill()

    def replace(self) -> Child:
        """Start a new one; returns the old one, which still runs."""
        old, self.child = self.child, self._start()
        return old

    def restore(self, old: Child) -> None:
        """Kill the new one and go back to the old one."""
        self.child.kill()
        self.child = old


SAME_REQUEST_S = 0.5
"""Signals closer together than this count as one: `timeout` and closing terminals send two at once."""
_POLL_S = 0.05
_SHARD_END_S = 10.0
_START_S = 1800.0
"""Time for a new shard to load its model."""
_ROUTER_GRACE_S = 10.0
FLUSH_TIMEOUT_S = 2.0
_CLEAN_EXITS = (None, 0, -signal.SIGTERM)
"""Exit codes of a child that ends on request; SIGTERM itself kills only one that does not listen yet."""


class Stop(Exception):
    """A signal asked the launcher to end."""


class Forced(Exception):
    """A second signal asked it to end at once."""


@dataclass(frozen=True)
class Address:
    """Host and port that something on this machine listens on."""

    host: str
    port: int
    scheme: str = "http"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `host:port`, with an IPv6 host in brackets."""
        host, _, port = text.rpartition(":")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def reachable_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"

    @property
    def own_url(self) -> str:
        """The URL with the host as it was given, such as http://0.0.0.0:3000."""
        return self._url(self.host)

    @property
    def url(self) -> str:
        """URL for a client on this machine."""
        return self._url(self.reachable_host)

    def is_ready(self) -> bool:
        """Whether `GET /ready` of the server returns 200, whatever its certificate."""
        host, port = self.reachable_host, self.port
        connection = http.client.HTTPConnection(host, port, timeout=2)
        if self.scheme == "https":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(host, port, timeout=2, context=context)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _url(self, host: str) -> str:
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


class Signals:
    """SIGTERM, SIGINT and SIGHUP in the order of their arrival, and SIGUSR2, which replaces all processes."""

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._counted_at = -math.inf
        self.reloads = False
        """Whether SIGHUP reloads the operator's files instead of ending the server."""
        self._asked: Counter[int] = Counter()
        self._outlives_terminal = False

    def take(self, number: int) -> int:
        """How often the signal arrived since the last call, if it does not end the server."""
        return self._asked.pop(number, 0)

    @contextmanager
    def caught(self) -> Iterator["Signals"]:
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # set by nohup
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, seconds: float) -> str | None:
        """The name of the next signal, or None after `seconds`. One that comes meanwhile is returned at the end."""
        if not self._arrived:
            # not SimpleQueue.get(timeout): a handler that ran past the timeout would make it wait for ever (3.11, 3.12)
            time.sleep(seconds)
        return signal.Signals(self._arrived.popleft()).name if self._arrived else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGUSR2 or (number == signal.SIGHUP and self.reloads):
            self._asked[number] += 1
            return
        if number == signal.SIGHUP and self._outlives_terminal:
            return
        if now - self._counted_at >= SAME_REQUEST_S:
            self._counted_at = now
            self._arrived.append(number)


@dataclass(frozen=True)
class ShardStart:
    """How a shard is started, and the files that signal its state."""

    start: Callable[[], Child]
    files: ShardFiles


@dataclass(frozen=True)
class Processes:
    """How each process of a server is started. One that exits while serving is restarted."""

    shards: Sequence[ShardStart]
    """Requests of one that exits resume on another shard, or on the restarted one."""
    router: Callable[[], Child] | None = None
    """Its connections are lost when it exits. None if the shards serve remote routers."""
    router_ready_file: Path | None = None
    """Created by the router once it is ready."""
    replacement_file: Path | None = None
    """Exists while a new router replaces a running one: the new one listens only once it is ready."""
    loader: Callable[[], Child] | None = None
    """Only adapters that are being loaded are lost when it exits."""


class Supervisor:
    """Shards, a loader and a router as one server."""

    def __init__(
        self,
        processes: Processes,
        is_ready: Callable[[], bool],
        drain_timeout_s: float,
        log: logging.Logger,
        preload: Preload | None = None,
    ) -> None:
        """`preload`: the process that forks some of them."""
        self._processes = processes
        self._is_ready = is_ready
        self._drain_timeout_s = drain_timeout_s
        self._log = log
        self._preload = preload
        self._shards: list[SupervisedShard] = []
        self._router: SupervisedHelper | None = None
        self._loader: SupervisedHelper | None = None
        self._retiring: list[Child] = []
        """Replaced processes that finish their requests while their successors serve."""

    def run(self, signals: Signals, when_ready: Callable[[], None]) -> Exit:
        """Serve until a signal. Raises LauncherError if a process cannot start or exits too often."""
        try:
            self._start()
            try:
                self._wait_until_ready(signals)
                when_ready()
                self._watch(signals)
            except Stop as stop:
                seconds = self._drain_timeout_s
                self._log.info("server_ending: %s: ending; running requests have %g seconds", stop, seconds)
            return self._drain(signals)
        except Forced:
            self._log.warning("server_forced: second signal: ending at once")
            return Exit.FORCED
        except LauncherError:
            self._end_after_failure()
            raise
        finally:
            for child in self._children():
                child.kill()

    def _start(self) -> None:
        for shard in self._processes.shards:
            self._shards.append(SupervisedShard(shard.start, shard.files, self._log))
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
            self._handle_signal(signals)
            for child, exit in exits:
                if child.exit_code is not None or child.reason:
                    # Nobody is connected yet: what the others would log while they end only hides the reason. The
                    # router goes first: it would log that it has lost the shard.
                    for other in reversed(self._children()):
                        other.kill()
                    plain = f"{child.ending} before the server was ready"
                    raise LauncherError(
                        exit, f"{child.name} could not start: {child.reason}" if child.reason else plain
                    )

    def _watch(self, signals: Signals) -> None:
        while True:
            self._check(signals)
            if signals.take(signal.SIGUSR2):
                self._replace_all(signals)

    def _check(self, signals: Signals, starting: SupervisedHelper | None = None) -> None:
        """Handle signals and restart what exited, except `starting`, which may not be able to start."""
        self._handle_signal(signals)
        for process in (*self._shards, self._loader, self._router):
            if process is not None and process is not starting:
                process.check()

    def _replace_all(self, signals: Signals) -> None:
        """Rolling restart: shards one after the other, then the loader, then the router."""
        self._log.info("rolling_restart_started: SIGUSR2: replacing every process")
        for shard in self._shards:
            shard.replace()
            if not self._wait_for(lambda shard=shard: shard.is_ready, signals, ending=shard.child):  # type: ignore[misc]
                name = shard.child.name
                self._log.error("rolling_restart_stopped: the new %s did not become ready; it stops here", name)
                return
        if self._loader is not None:
            self._retire(self._loader.replace(), signals)
        if self._router is None or self._replace_router(self._router, signals):
            self._log.info("rolling_restart_completed: every process was replaced")

    def _replace_router(self, router: SupervisedHelper, signals: Signals) -> bool:
        """The old router serves until the new one is ready. Returns whether it became ready."""
        ready, replacement = self._processes.router_ready_file, self._processes.replacement_file
        assert ready is not None and replacement is not None
        ready.unlink(missing_ok=True)
        replacement.touch()
        old = router.replace()
        self._retiring.append(old)
        has_exited = lambda: router.child.exit_code is not None
        self._wait_for(lambda: ready.exists() or has_exited(), signals, starting=router)
        replacement.unlink()
        if has_exited() or not ready.exists():
            how = router.child.ending
            self._log.error("router_kept: the new router did not become ready (%s): the old one keeps serving", how)
            self._retiring.remove(old)
            router.restore(old)
            return False
        old.hand_over()
        self._retire(old, signals)
        return True

    def _wait_for(
        self,
        condition: Callable[[], bool],
        signals: Signals,
        ending: Child | None = None,
        starting: SupervisedHelper | None = None,
    ) -> bool:
        """Supervise until `condition` holds; False at a timeout. At its timeout, `ending` is killed; its successor has
        another timeout.
        """
        end = time.monotonic() + self._drain_timeout_s + _SHARD_END_S
        while not condition():
            if time.monotonic() > end:
                if ending is None or ending.exit_code is not None:
                    return False
                ending.kill()
                ending, end = None, time.monotonic() + _START_S
            elif ending is not None and ending.exit_code is not None:
                ending, end = None, time.monotonic() + _START_S
            self._check(signals, starting)
        return True

    def _retire(self, old: Child, signals: Signals) -> None:
        """Wait until a replaced process has exited; kill it at a timeout."""
        if old not in self._retiring:
            self._retiring.append(old)
            old.terminate()
        if not self._wait_for(lambda: old.exit_code is not None, signals):
            self._log.warning("process_killed: %s did not exit in time; killing it", old.name)
        old.kill()
        self._retiring.remove(old)

    def _handle_signal(self, signals: Signals) -> None:
        """Wait for a moment. Raises Stop for a signal that ends the server."""
        if self._preload is not None:
            self._check_preload(self._preload)
        name = signals.wait(_POLL_S)
        if name is not None:
            raise Stop(name)
        if signals.take(signal.SIGHUP) and self._router is not None:
            self._log.info("files_reloading: SIGHUP: the router reloads its files")
            self._router.child.reload()

    def _check_preload(self, preload: Preload) -> None:
        """Start it if it has ended, or if the loader, which cannot, waits for it; forget what the launcher adopted."""
        reap_adopted([preload.pid, *(child.pid for child in self._children())])
        pid = preload.pid
        preload.check()
        if preload.pid != pid and pid:
            self._log.error("process_ended: the process that forks shards ended: it was started again")

    def _drain(self, signals: Signals) -> Exit:
        """End the router first: it finishes running requests, which needs the shards."""
        gone: list[str] = []
        if self._router is not None:
            self._end([self._router.child], self._drain_timeout_s + _ROUTER_GRACE_S, signals)
            router = self._router.child
            if router.exit_code not in _CLEAN_EXITS:
                raise LauncherError(Exit.WEBSERVER_FAILED, f"{router.ending} while draining")
            if router.exit_code is None:
                raise LauncherError(Exit.WEBSERVER_FAILED, "the router did not drain in time and was killed")
            gone = [shard.child.ending for shard in self._shards if shard.child.exit_code not in _CLEAN_EXITS]
        # Without a local router, the shards finish the requests of remote routers.
        timeout_s = _SHARD_END_S if self._router is not None else self._drain_timeout_s + _SHARD_END_S
        others = [child for child in self._children() if self._router is None or child is not self._router.child]
        self._end(others, timeout_s, signals)
        if any(child.exit_code is None for child in others):
            self._log.warning("process_killed: a shard or the loader did not exit in time; killing it")
        if gone:
            raise LauncherError(Exit.SHARD_FAILED, f"{gone[0]} before the router had drained")
        self._log.info("server_ended: ended")
        return Exit.OK

    def _end(self, children: Sequence[Child], timeout_s: float, signals: Signals) -> None:
        """Ask them to exit, and wait. Raises Forced at a signal."""
        for child in children:
            child.terminate()
        end = time.monotonic() + timeout_s
        while any(child.exit_code is None for child in children) and time.monotonic() < end:
            if signals.wait(_POLL_S) is not None:
                raise Forced

    def _end_after_failure(self) -> None:
        """Give the other processes a moment to answer their clients."""
        for child in self._children():
            child.terminate()
        end = time.monotonic() + FLUSH_TIMEOUT_S
        for child in self._children():
            child.wait(max(0.0, end - time.monotonic()))

    def _children(self) -> list[Child]:
        shards = [shard.child for shard in self._shards]
        helpers = [helper.child for helper in (self._loader, self._router) if helper is not None]
        return [*shards, *helpers, *self._retiring]
