"""Restarts children that exit, with a delay, until they exit too often. Files signal a child's state."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.processes.process import Child

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
