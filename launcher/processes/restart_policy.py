"""A child that is started again when it ends, until that makes no sense any more.

Knows how often and how soon; not what the child does. Files tell of the child: that it has served, and that it hangs.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.processes.process import Child

MOST_ENDS = 5
DELAYS = (0.0, 0.5, 1.0, 2.0)
"""Seconds before the next start, by the number of ends running."""
WINDOW_S = 60.0


@dataclass(frozen=True)
class Marks:
    """Files that tell of a shard."""

    served: Path
    """It has completed a request."""
    stuck: Path
    """The router finds that it hangs."""
    ready: Path
    """It takes requests."""

    def clear(self) -> None:
        for mark in (self.served, self.stuck, self.ready):
            mark.unlink(missing_ok=True)


class SupervisedShard:
    """A shard. Ends are counted from the last one in whose life a request was completed."""

    def __init__(self, start: Callable[[], Child], marks: Marks, log: logging.Logger) -> None:
        self._start = start
        self._marks = marks
        self._log = log
        self._num_ends = 0
        self._start_at = 0.0
        self._is_replaced = False
        self.child = self._started()

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.child.exit_code is None and self._marks.ready.exists()

    def replace(self) -> None:
        """Ask it to finish what it has; another one is started when it has ended."""
        self._is_replaced = True
        self._marks.ready.unlink(missing_ok=True)
        self.child.terminate()

    def look(self) -> None:
        """Once in a while. Raises LauncherError after too many ends."""
        if self._marks.stuck.exists() and self.child.exit_code is None:
            self._log.error("%s hangs and is ended", self.child.name)
            self.child.kill()
        if self.child.exit_code is None:
            return
        if self._is_replaced:
            self._is_replaced = False
        elif not self._start_at:
            self._count()
        if time.monotonic() >= self._start_at:
            self.child = self._started()

    def _count(self) -> None:
        self.child.kill()  # what it may have started itself
        self._num_ends = 1 if self._marks.served.exists() else self._num_ends + 1
        if self._num_ends >= MOST_ENDS:
            sentence = f"{self.child.ending}, the {MOST_ENDS}th time running without having completed a request"
            raise LauncherError(Exit.SHARD_KEEPS_ENDING, sentence)
        delay = DELAYS[min(self._num_ends, len(DELAYS)) - 1]
        self._start_at = time.monotonic() + delay
        self._log.error("%s: starting another one%s", self.child.ending, f" in {delay:g} s" if delay else "")

    def _started(self) -> Child:
        self._start_at = 0.0
        self._marks.clear()
        return self._start()


class SupervisedHelper:
    """A loader or a router. It may not end too often within a while."""

    def __init__(self, start: Callable[[], Child], too_often: Exit, log: logging.Logger) -> None:
        self._start = start
        self._too_often = too_often
        self._log = log
        self._ends: deque[float] = deque(maxlen=MOST_ENDS)
        self.child = start()

    def look(self) -> None:
        """Once in a while. Raises LauncherError after too many ends."""
        if self.child.exit_code is None:
            return
        now = time.monotonic()
        if len(self._ends) == MOST_ENDS and now - self._ends[0] < WINDOW_S:
            raise LauncherError(self._too_often, f"{self.child.ending} again and again while serving")
        self._ends.append(now)
        self._log.error("%s: starting another one", self.child.ending)
        self.replace().kill()

    def replace(self) -> Child:
        """Start another one; returns the one that was there, which still runs."""
        old, self.child = self.child, self._start()
        return old

    def take_back(self, old: Child) -> None:
        """The one that was there before is the one again."""
        self.child.kill()
        self.child = old
