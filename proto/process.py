"""The current process: its end with the parent, its priority, the reason of its failure, open files, freed memory;
and the command and environment of a child. No child outlives the thread that started it: the kernel ends it, as
`tethered` or `end_with_parent` asks.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def signal_at_parent_death(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


MAX_FILES = 1 << 20
"""More are never needed, and some libraries go through all possible descriptors."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, for this process and its children; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return soft


def report_failure(path: str | None, reason: str) -> bool:
    """Leave the reason of a failure in the file at `path`, from which the launcher ends with it or logs it.

    Returns False without a path, or if it cannot be written: then the process itself must log the reason.
    """
    if path is None:
        return False
    try:
        Path(path).write_text(" ".join(reason.split()))
    except OSError:
        return False
    return True


MAX_KEPT = 16 << 20
"""Bytes that are freed before they are returned: to return them takes as long as to convert a quarter of them."""


GC_OBJECTS = 50_000
"""New objects between two garbage collections. With Python's 700 they took 15 % of the time of 256 streams in a router,
and 8 % of a shard's for 64 requests with drafts.
"""


def keep_objects() -> None:
    """Exclude the objects that exist now from garbage collection: they live as long as the process, and collecting them
    would stall it for 0.2 s. New ones are collected seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)


REST_S = 10.0
"""Seconds without requests after which a process returns freed memory."""


def return_freed_memory() -> bool:
    """Return freed memory to the system, which the C library keeps where it lies between blocks in use. Takes
    milliseconds, without the GIL. Returns whether the library can.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    return trim is not None


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to KEPT_BLOCK for the next ones. By default the C library takes each block above 32 MiB
    from the system and gives it back, and the system clears its pages anew. Returns whether the library can.
    """
    options = getattr(ctypes.CDLL(None), "mallopt", None)
    thresholds = (_MMAP_THRESHOLD, _TRIM_THRESHOLD)
    return options is not None and all(options(option, KEPT_BLOCK) for option in thresholds)


def share_freed_memory() -> bool:
    """Let all threads that start from now on use one heap. By default each has its own, in which what it frees stays.
    Returns whether the library can.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    return option is not None and bool(option(_ARENA_MAX, 1))


class FreedMemory:
    """Returns memory to the system while much is used and freed."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So many bytes were freed. Returns freed memory after every MAX_KEPT of them."""
        self._num_bytes += num_bytes
        if self._num_bytes >= MAX_KEPT:
            self._num_bytes = 0
            return_freed_memory()


KEPT_BLOCK = 512 << 20
"""Bytes: more than the logits of a usual step."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX."""

ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")
"""Variables that a child needs to import what its parent does; others may be secrets."""


def usable_cores() -> int:
    """Cores that the calling thread may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on. Another process may take it first."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command of a child."""
    return (sys.executable, "-m", module, *arguments)


def limited_environment() -> dict[str, str]:
    """The environment of a child that computes with what others sent."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


def start_connected(
    module: str,
    *arguments: str,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    inherits: Sequence[int] = (),
    **options: Any,
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a child with one end of a socket, whose descriptor is its first argument; returns the other end. Not in a
    thread that ends before the child should. `inherits`: other descriptors that stay open in the child; `options` are
    those of subprocess.Popen.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs:
        command = python(module, str(theirs.fileno()), *arguments)
        process = subprocess.Popen(command, pass_fds=[theirs.fileno(), *inherits], stdin=subprocess.DEVNULL, **options)
    return process, ours


def end_with_parent(parent_pid: int | None = None) -> None:
    """Be killed when the parent ends; at once if it is not `parent_pid` any more."""
    signal_at_parent_death()
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def lower_priority(niceness: int, pid: int = 0) -> None:
    """Let a process run at a lower priority than the caller's. For oneself: to be called once."""
    if sys.platform == "linux":
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
    elif pid == 0:
        os.nice(niceness)


def raise_priority(pid: int) -> bool:
    """Let a process run like the caller again; whether the system allows that."""
    if sys.platform != "linux":
        return False
    try:
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True


@contextlib.contextmanager
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


_TETHER = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
os.getppid() == int(sys.argv[1]) or sys.exit(1)  # the parent ended before the line above
os.execv(sys.argv[2], sys.argv[2:])  # keeps what prctl has set
"""
"""A program that becomes its command, which is killed when the parent ends. It imports nothing of the project: code
between fork and exec would run in a copy of the parent, where another thread may have held any lock."""


def tethered(command: Sequence[str], parent_pid: int | None = None) -> list[str]:
    """The command of a child that is killed when `parent_pid`, by default this process, ends. Linux only."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-ISc", _TETHER, str(parent_pid or os.getpid()), *command]


def environment_of_children(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: it imports the same code as this process, whatever the working directory holds."""
    # gRPC's own log lines have another format, and are repeated with every attempt to connect
    environment = {"GRPC_VERBOSITY": "NONE"} | dict(base) | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if "PYTORCH_CUDA_ALLOC_CONF" not in base:  # torch's older name for the same
        # joined weights leave holes in CUDA memory, which only such segments give back
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    root = str(Path(__file__).parents[2])
    if root != sysconfig.get_path("purelib"):
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [base.get("PYTHONPATH")])])
    return environment
