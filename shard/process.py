"""The shard as a process: which signals end it, and that it never outlives its parent. Knows nothing of models."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
POLL_S = 0.5
FORCED_END_S = 5.0


def watch_signals(on_end: Callable[[], None], on_orphaned: Callable[[], None], parent_pid: int | None) -> None:
    """Call `on_end` at SIGTERM (and at SIGINT without a parent, which else decides), `on_orphaned` when the parent is
    gone. Both are called in a thread of their own, so they may take locks. Call this in the main thread, before others
    exist: it blocks the signals for all of them.
    """
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if parent_pid is not None and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def watch() -> None:
        while parent_pid is None or os.getppid() == parent_pid:
            if sys.platform == "linux":
                info = signal.sigtimedwait(signals, POLL_S)
                number = info.si_signo if info else None
            else:
                time.sleep(POLL_S)
                number = signal.sigwait(signals) if signals & signal.sigpending() else None
            if number == signal.SIGTERM or (number == signal.SIGINT and parent_pid is None):
                on_end()
        on_orphaned()
        time.sleep(FORCED_END_S)
        os._exit(1)

    threading.Thread(target=watch, name="signals", daemon=True).start()
