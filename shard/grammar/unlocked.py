"""Takes a token into a matcher without the interpreter's lock.

`LLMatcher.consume_token` holds the lock, for up to 90 ms where a grammar is very ambiguous: no step goes on, for any
caller. `LLExecutor.consume_token_par` releases it where it has several matchers, and works in a thread of its own.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLExecutor, LLMatcher

from lorikeet.shard.grammar.threads import set_helper

MAX_ATTEMPTS = 20
"""To start a thread while no other library starts one."""


class UnlockedConsumer:
    """For any number of threads, each of which has an executor of its own."""

    def __init__(self, make_unusable: Callable[[], LLMatcher]) -> None:
        """`make_unusable` returns a matcher with an error, which takes in nothing: the second one of each call."""
        self._make_unusable = make_unusable
        self._own = threading.local()

    def consume(self, matcher: LLMatcher, token_id: int) -> bool:
        """As `matcher.consume_token(token_id)`."""
        worker = self._worker()
        if worker is None:
            return bool(matcher.consume_token(token_id))
        return bool(worker.executor.consume_token_par([(matcher, token_id), (worker.unusable, token_id)])[0])

    def processor_time(self) -> float:
        """Seconds of processor time of the calling thread, and of the one that works for it."""
        worker = self._worker()
        return time.thread_time() + (0.0 if worker is None else _processor_time(worker.thread_id))

    def _worker(self) -> "_Worker | None":
        """That of the calling thread. None where the system does not tell the processor time of other threads."""
        if not hasattr(self._own, "worker"):
            self._own.worker = None
            if (started := _start_executor()) is not None:
                self._own.worker = _Worker(*started, self._make_unusable())
                set_helper(started[1])
        return self._own.worker


@dataclass(frozen=True)
class _Worker:
    """What works for one thread."""

    executor: LLExecutor
    thread_id: int
    unusable: LLMatcher


def _processor_time(thread_id: int) -> float:
    """In seconds. Raises OSError where the system does not tell it."""
    return int(Path(f"/proc/self/task/{thread_id}/schedstat").read_bytes().split()[0]) / 1e9


def _start_executor() -> tuple[LLExecutor, int] | None:
    """An executor and its thread, which inherits the calling thread's priority. None where it is not certain which
    thread that is, or how much time it takes.
    """
    tasks = Path("/proc/self/task")
    for _ in range(MAX_ATTEMPTS if tasks.exists() else 0):
        before = set(os.listdir(tasks))
        executor = LLExecutor(num_threads=1)
        started = set(os.listdir(tasks)) - before - {str(thread.native_id) for thread in threading.enumerate()}
        if len(started) == 1:
            thread_id = int(started.pop())
            try:
                _processor_time(thread_id)
            except OSError:
                return None
            return executor, thread_id
    return None
