"""Threads for work on texts, in which callers take turns and long texts do not delay short ones."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from lorikeet.router.turns import Turns

T = TypeVar("T")

LONG_TEXT = 1 << 16
"""Characters from which on a text is long: about 50 ms of one core. One long text is processed at a time."""


@dataclass(eq=False, slots=True)
class _Job:
    """One piece of work and its caller's answer."""

    caller: str
    work: Callable[[], Any]
    answer: asyncio.Future[Any]


class _Queue:
    """Threads of one kind and the jobs that wait for them."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._turns: Turns[_Job] = Turns()
        self._num_running = 0

    async def run(self, work: Callable[[], Any], caller: str, charge: float) -> Any:
        """A job whose caller leaves before it starts is never started."""
        job = _Job(caller, work, asyncio.get_running_loop().create_future())
        self._turns.push(caller, job, charge)
        self._start()
        try:
            return await job.answer
        finally:
            self._turns.remove(caller, job)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while len(self._turns) and self._num_running < self._num_threads:
            job = self._turns.pop()
            self._num_running += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            running.add_done_callback(partial(self._end, job))

    def _end(self, job: _Job, done: asyncio.Future[Any]) -> None:
        self._num_running -= 1
        error = None if done.cancelled() else done.exception()
        if not job.answer.done():
            if done.cancelled():
                job.answer.cancel()
            elif error is not None:
                job.answer.set_exception(error)
            else:
                job.answer.set_result(done.result())
        self._start()


class TextPool:
    """`num_threads` threads for short texts, and one for long ones."""

    def __init__(self, num_threads: int) -> None:
        self._short = _Queue(num_threads, "tokenize")
        self._long = _Queue(1, "tokenize-long")
        self.num_pending = 0
        """Texts that are being processed or wait for a thread."""

    async def run(self, work: Callable[[], T], caller: str, num_chars: int) -> T:
        """The result of `work`, which runs in a thread. `num_chars` is the length of its text, which is charged to the
        caller. Raises what `work` raises.
        """
        queue = self._long if num_chars >= LONG_TEXT else self._short
        self.num_pending += 1
        try:
            return cast(T, await queue.run(work, caller, num_chars))
        finally:
            self.num_pending -= 1

    def close(self) -> None:
        """Jobs that wait are cancelled."""
        self._short.close()
        self._long.close()
