"""The shard's process: signals that end it, the watch on its parent, and the priority of threads."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from lorikeet.proto.process import signal_at_parent_death

POLL_S = 0.5
SAME_REQUEST_S = 0.5
"""A signal this soon after another is the same request: `timeout` sends two at once."""
FORCED_END_S = 5.0
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def end_process(code: int) -> None:
    """End at once: threads of libraries must not keep the process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def hold_signals() -> None:
    """Block the signals that end a shard until `watch_signals`. Call this before any other thread exists: a thread that
    does not block them would receive them, and the process would end at once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def lower_priority(niceness: int) -> None:
    """Raise the calling thread's niceness above the process's own, on Linux."""
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(own + niceness, 19))


def watch_signals(on_end: Callable[[], None], on_orphaned: Callable[[], None], parent_pid: int | None) -> None:
    """Call `on_end` at SIGTERM or SIGINT, `on_orphaned` when the parent has ended.

    With a parent, only the parent's own SIGTERM counts: a signal to all processes of a server must not end the shard
    while the router still has requests for it. Both are called in a separate thread, so they may take locks.
    """
    if parent_pid is not None:
        signal_at_parent_death(signal.SIGTERM)

    def watch() -> None:
        counted_at = -math.inf
        while parent_pid is None or os.getppid() == parent_pid:
            number, sender = _next_signal()
            is_meant = number is not None and parent_pid is None
            if parent_pid is not None:
                is_meant = number == signal.SIGTERM and sender in (parent_pid, None)
            if is_meant and time.monotonic() - counted_at >= SAME_REQUEST_S:
                counted_at = time.monotonic()
                on_end()
        on_orphaned()
        time.sleep(FORCED_END_S)
        os._exit(1)

    threading.Thread(target=watch, name="signals", daemon=True).start()


def _next_signal() -> tuple[int | None, int | None]:
    """A blocked signal that has arrived, and its sender if the system reports it; None after POLL_S without one."""
    if sys.platform == "linux":
        info = signal.sigtimedwait(_SIGNALS, POLL_S)
        return (info.si_signo, info.si_pid) if info else (None, None)
    else:  # noqa: RET505  (a type checker sees one of the two)
        time.sleep(POLL_S)
        return (signal.sigwait(_SIGNALS) if _SIGNALS & signal.sigpending() else None), None
