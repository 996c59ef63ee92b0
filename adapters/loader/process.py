"""What the loader's processes ask of the system: to end with their parent, to run at a lower priority, and to
limit their memory.

Linux knows both; elsewhere a process keeps its priority, and notices its parent's end by its closed socket.
"""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorikeet.proto.process import signal_at_parent_death

NICENESS = 9
"""Added to one's own. A process that did not step back leaves 12 % of its core: hardly felt, but not nothing."""


def end_with_parent(parent_pid: int | None = None) -> None:
    """Be killed when the parent ends; at once if it is not `parent_pid` any more."""
    signal_at_parent_death()
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def step_back(pid: int = 0) -> None:
    """Run at a lower priority than the caller's niceness. For oneself: to be called once."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    elif pid == 0:
        os.nice(NICENESS)


def step_forward(pid: int) -> bool:
    """Let a process that stepped back run like the caller; whether the system allows that."""
    if sys.platform != "linux":
        return False
    try:
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Inside, this process can allocate so much more than it has now. Only Linux counts what it has."""
    if sys.platform != "linux":
        yield
        return
    limits_before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = _data_bytes() + num_bytes
    limits = [limit for limit in limits_before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit_bytes, *limits]), limits_before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits_before)


def _data_bytes() -> int:
    """What RLIMIT_DATA limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
