"""What the loader's processes ask of the system: to end with their parent, and to step back behind everything else.

Linux knows both; elsewhere a process keeps its priority, and notices its parent's end by its closed socket.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int | None = None) -> None:
    """Be killed when the parent ends; at once if it is not `parent_pid` any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def step_back(pid: int = 0) -> None:
    """Run only when nothing else wants the processor. Falls back to the lowest niceness."""
    if sys.platform == "linux":
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    elif pid == 0:
        os.nice(19)


def step_forward(pid: int) -> bool:
    """Let a process that stepped back run like any other; whether the system allows that."""
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True
