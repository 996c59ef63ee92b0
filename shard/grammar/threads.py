"""Threads for work that may take long: callers have turns, each job has a time limit, and a slow one does not hold a
thread of others.

A thread cannot be killed. One whose job takes long steps back behind all other threads and is replaced; when its time
is up, its job has failed, and the thread ends with the work.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lorikeet.proto.shares import Turns
from lorikeet.shard.system.process import lower_priority

FAST_S = 0.05
"""How long a job runs before its thread steps back."""
LIMIT_S = 15.0
"""Time limit of a job."""
MAX_SLOW = 4
"""Most threads that are replaced at once. The router rejects what needs more than seconds, so that each ends."""
STACK = 32 << 20
"""Bytes of the stack of a thread: llguidance compiles by recursion, and an overflow would end the process."""
_STARTING = threading.Lock()
_NICENESS = 14
"""Leaves 96 % of a core to a thread of niceness 0, and gets the rest."""


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    otherwise: Any
    future: Future[Any]
    caller: str


@dataclass(eq=False, slots=True)
class _Running:
    """A job in its thread."""

    job: _Job
    started: float
    is_slow: bool = False
    thread_ids: list[int] = field(default_factory=lambda: [threading.get_native_id()])
    """Its thread, and the one that works for that."""


class _Own(threading.local):
    """Of one thread."""

    running: _Running | None = None
    helper_id: int | None = None


_OWN = _Own()


def set_helper(thread_id: int) -> None:
    """Another thread works for the calling one from now on, and steps back with it."""
    _OWN.helper_id = thread_id
    if (running := _OWN.running) is not None:
        running.thread_ids.append(thread_id)
        if running.is_slow:  # it stepped back before, or while this was appended
            _step_back([thread_id])


class Threads:
    """`num_threads` threads of one priority, and those that stepped back."""

    def __init__(self, num_threads: int, fast_s: float = FAST_S, limit_s: float = LIMIT_S, niceness: int = 0) -> None:
        """`niceness` is added to the process's own."""
        self._fast_s, self._limit_s, self._niceness = fast_s, limit_s, niceness
        self._turns: Turns[_Job] = Turns()
        self._has_jobs = threading.Condition()
        """Guards the turns."""
        self._changed = threading.Condition()
        self._running: set[_Running] = set()
        self.num_slow = 0
        """Threads that stepped back and have not ended."""
        for _ in range(num_threads):
            self._start(self._work)
        self._start(self._watch)

    def submit(self, work: Callable[[], Any], otherwise: Any, caller: str = "") -> Future[Any]:
        """The result of `work`, or `otherwise` after the time limit. Callers share the threads by their jobs' times."""
        job = _Job(work, otherwise, Future(), caller)
        with self._has_jobs:
            self._turns.push(caller, job, 1.0)
            self._has_jobs.notify()
        return job.future

    def _next(self) -> _Job:
        with self._has_jobs:
            self._has_jobs.wait_for(lambda: len(self._turns))
            return self._turns.pop()

    @staticmethod
    def _start(target: Callable[[], None]) -> None:
        with _STARTING:
            before = threading.stack_size(STACK)
            try:
                threading.Thread(target=target, name="grammar", daemon=True).start()
            finally:
                threading.stack_size(before)

    def _work(self) -> None:
        if self._niceness:
            lower_priority(self._niceness)
        while not self._run(self._next()):
            pass

    def _run(self, job: _Job) -> bool:
        """Run a job. Returns whether another thread has taken the place of this one."""
        running = _OWN.running = _Running(job, time.monotonic())
        if _OWN.helper_id is not None:
            running.thread_ids.append(_OWN.helper_id)
        with self._changed:
            self._running.add(running)
            self._changed.notify()
        try:
            result, failure = job.work(), None
        except BaseException as error:
            result, failure = None, error
        with self._has_jobs:
            self._turns.charge(job.caller, 1000 * (time.monotonic() - running.started))
        with self._changed:
            self._running.discard(running)
            self.num_slow -= running.is_slow
        with suppress(InvalidStateError):  # its time was up
            if failure is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(failure)
        return running.is_slow

    def _watch(self) -> None:
        """Look after jobs that take long."""
        with self._changed:
            while True:
                expired = self._look()
                self._changed.release()  # a callback of the future may submit another job
                try:
                    for job in expired:
                        with suppress(InvalidStateError):
                            job.future.set_result(job.otherwise)
                finally:
                    self._changed.acquire()
                self._changed.wait(self._fast_s / 2 if self._running else None)

    def _look(self) -> list[_Job]:
        now, expired = time.monotonic(), list[_Job]()
        for running in self._running:
            if not running.is_slow and now - running.started > self._fast_s and self.num_slow < MAX_SLOW:
                running.is_slow = True
                self.num_slow += 1
                _step_back(running.thread_ids)
                self._start(self._work)
            if now - running.started > self._limit_s and not running.job.future.done():
                expired.append(running.job)
        return expired


def _step_back(thread_ids: Sequence[int]) -> None:
    """Only Linux has priorities of threads."""
    for thread_id in thread_ids if sys.platform == "linux" else ():
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread_id, _NICENESS)
