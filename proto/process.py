"""A process that must not outlive its parent."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def signal_at_parent_death(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
