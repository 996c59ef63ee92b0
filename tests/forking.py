"""What the process imports from which the servers of tests are forked, and how these fork their own children.

A child is forked where a command of ours would be executed, unless its parent has several threads by then: then it
starts alone. `tests/forked.py` starts the process.
"""

import asyncio
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

os.environ["GRPC_VERBOSITY"] = "NONE"  # read once; every process of a server has it

import huggingface_hub.constants
import peft  # noqa: F401

import lorikeet.adapters.loader.worker
import lorikeet.launcher.run
import lorikeet.router.server
import lorikeet.shard.startup.serve  # noqa: F401
from lorikeet.proto import preload
from lorikeet.proto.process import end_with_parent

_Popen = subprocess.Popen
_TETHERED = "-ISc"


def words_of(command: Any) -> tuple[list[str], bool] | None:
    """The module and arguments of a command that runs one of ours, and whether it is tethered; None for others."""
    words = list(command) if isinstance(command, list | tuple) else []
    is_tethered = words[1:2] == [_TETHERED]
    words = words[4:] if is_tethered else words
    if words[:2] != [sys.executable, "-m"] or not words[2].startswith("lorikeet."):
        return None
    return words[2:], is_tethered


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


class ForkedChild:
    """A child, with the methods of subprocess.Popen that our code calls."""

    def __init__(self, words: Sequence[str], is_tethered: bool, **options: Any) -> None:
        self.returncode: int | None = None
        self.stdin: Any = None
        reading = writing = None
        if options.get("stdin") == subprocess.PIPE:
            reading, writing = os.pipe()
            options["stdin"] = reading
        parent = os.getpid()
        # a signal that comes before the child has its own handlers would be taken by the parent's
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, parent if is_tethered else None, blocked, options)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if reading is not None and writing is not None:
            os.close(reading)
            self.stdin = os.fdopen(writing, "wb", buffering=0)
        self._exited = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._end(ended[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._exited], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
        while (code := self.poll()) is None:  # another thread reaps it
            time.sleep(0.001)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self, status: int) -> None:
        self.returncode = os.waitstatus_to_exitcode(status)


class Popen(_Popen):
    """Forks what runs a module of ours."""

    def __new__(cls, args: Any, **options: Any) -> Any:
        found = words_of(args)
        pipes = (options.get("stdout"), options.get("stderr"))
        if found is None or subprocess.PIPE in pipes or num_threads() > 1:
            return _Popen.__new__(cls)
        return ForkedChild(*found, **options)


def _become(
    words: Sequence[str], parent: int | None, blocked: set[signal.Signals | int], options: dict[str, Any]
) -> NoReturn:
    """Run a module in this process, as an executed one would. blocked: the signals that it does not receive."""
    code = 1
    try:
        if parent is not None:
            end_with_parent(parent)
        if options.get("process_group") == 0:
            os.setpgid(0, 0)
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        gc.freeze()  # files of the parent that are garbage would close this process's
        _connect(options)
        environment = dict(os.environ if options.get("env") is None else options["env"])
        os.environ.clear()
        os.environ.update(environment)
        module, *arguments = words
        sys.argv = [module, *arguments]
        sys.modules.pop(module, None)  # runpy warns of it
        preload.set_title(["python", "-m", *words])
        code = run(module)
    finally:
        os._exit(code)


def _connect(options: dict[str, Any]) -> None:
    """Standard streams, and no other files than `pass_fds`."""
    kept = sorted(options.get("pass_fds", ()))
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        target = options.get(name)
        if target is None:
            continue
        target = 1 if target == subprocess.STDOUT else nothing if target == subprocess.DEVNULL else target
        os.dup2(target if isinstance(target, int) else target.fileno(), number)
    low = 3
    for descriptor in [*kept, os.sysconf("SC_OPEN_MAX")]:
        os.closerange(low, min(descriptor, 1 << 16))
        low = descriptor + 1
    for descriptor in kept:
        os.set_inheritable(descriptor, True)


def run(module: str) -> int:
    """Run a module with the variables that libraries read while they are imported."""
    importlib.reload(huggingface_hub.constants)
    return preload.exit_code(module)


subprocess.Popen = Popen  # type: ignore[misc]
