"""The process that imports once what several processes of a server need, and forks them.

`python -m lorikeet.proto.preload FD MODULE… -PACKAGE…` imports the modules as if the packages were not installed, then
forks a process for each connection to the listening socket. To import them takes seconds of processor time and hundreds
of MiB, which its children share. It has one thread, so that forking is safe, and nothing of the operator's environment:
it forks those that read foreign files.

A forked process is the launcher's child: the process between the two exits at once, and the launcher adopts what its
descendants leave. So the launcher sees its exit code, and it ends with the launcher. Linux only.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lorikeet.proto.process import (
    ENVIRONMENT,
    end_with_parent,
    python,
    return_freed_memory,
    signal_at_parent_death,
    tethered,
)

_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE_BYTES = 65536
MAX_STARTS, WINDOW_S = 5, 60.0
"""A process that ended so often within so many seconds is not started again."""
REQUEST_S = 10.0
"""A client that connects sends its request at once; until then no other one is read."""
_TITLE_BYTES = 512
"""Place for the command of a forked process, which `ps` shows in place of this one's."""
_STANDARD = 3
"""Descriptors of standard input, output and error, the first that a request sends. The environment's is next."""
_LIBRARIES = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "CUDA_",
    "NVIDIA_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_",
    "HF_XET_",
    "HUGGINGFACE_HUB_CACHE",
    "HUGGINGFACE_CO_",
    "TRANSFORMERS_",
    "XDG_CACHE_HOME",
)
"""Prefixes of variables that libraries read while they are imported. None is a secret."""


def is_possible() -> bool:
    """Whether this system has what `Preload` needs."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


class ForkedProcess:
    """A process that a preloaded one forks, with the methods of subprocess.Popen that its users call, from any thread.

    It waits until `poll` has seen it, and never runs if it was ended before.
    """

    def __init__(
        self,
        address: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int | None = None,
        inherits: Sequence[int] = (),
        preload: "Preload | None" = None,
    ) -> None:
        """`address`: of the socket. `output`: descriptor of standard output and error, by default this process's;
        `inherits`: descriptors that keep their numbers in it; `preload`: what answers there, if this process starts it.
        Raises OSError if nothing answers.
        """
        self.pid = 0
        """0 until it was forked: the modules are still imported."""
        self.problem = ""
        """Why it was never forked."""
        self._preload = preload
        self._end: int | None = None
        self._lock = threading.Lock()
        self._exited: io.FileIO | None = None
        """Readable once the process has ended. Open as long as this object: another thread may wait for it."""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(address)
        request = {"module": module, "arguments": list(arguments), "inherits": list(inherits)}
        nothing, texts = os.open(os.devnull, os.O_RDONLY), os.memfd_create("environment")
        try:
            os.write(texts, json.dumps(dict(environment)).encode())
            out = sys.stdout.fileno() if output is None else output
            error = sys.stderr.fileno() if output is None else output
            descriptors = [nothing, out, error, texts, *inherits]
            socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
        finally:
            os.close(nothing)
            os.close(texts)

    def poll(self) -> int | None:
        """The process's exit code once it has ended; negative for a signal, always 0 for another process's child."""
        with self._lock:
            if self._end is None and not self.pid:
                self._receive()
            if self._end is None and self._exited is not None and _is_readable(self._exited):
                self._end = self._reaped()
            return self._end

    def wait_until_forked(self, timeout: float) -> None:
        """Raises subprocess.TimeoutExpired."""
        if self.poll() is None and not self.pid and not _is_readable(self._connection, timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout)
        self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end. Returns its exit code. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            seconds = None if until is None else max(0.0, until - time.monotonic())
            if not _is_readable(self._exited or self._connection, seconds):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        if self.poll() is not None:
            return
        with self._lock:
            if self._exited is not None:
                signal.pidfd_send_signal(self._exited.fileno(), number)
            else:
                self._give_up(-number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _receive(self) -> None:
        """Take its process id, if it was forked, and let it run."""
        if self._preload is not None:
            self._preload.check()
            if self._preload.problem:
                self._give_up(1, self._preload.problem)
                return
        if not _is_readable(self._connection):
            return
        try:
            pid = json.loads(self._connection.recv(_MAX_MESSAGE_BYTES))["pid"]
            self._exited = io.FileIO(os.pidfd_open(pid))
            self._connection.send(b"run")
            self.pid = pid
        except (OSError, ValueError):
            self._give_up(1, "the process that forks it has ended")

    def _give_up(self, code: int, problem: str = "") -> None:
        self._end, self.problem = code, problem
        with contextlib.suppress(OSError):  # the other end is gone
            self._connection.shutdown(socket.SHUT_RDWR)  # not closed: another thread may wait for it

    def _reaped(self) -> int:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # the launcher's child, and this is another process
            return 0


def _is_readable(file: io.FileIO | socket.socket, seconds: float | None = 0) -> bool:
    """Whether a file can be read within `seconds`; None waits for it."""
    return bool(select.select([file], [], [], seconds)[0])


class Preload:
    """The process, for the launcher, which starts it again when it has ended."""

    def __init__(
        self, folder: Path, modules: Sequence[str], environment: Mapping[str, str], without: Sequence[str] = ()
    ) -> None:
        """`folder`: for the socket; `without`: packages that libraries import only where they are installed, and that
        the forked processes can import. Changes this process: it adopts what its descendants leave.
        """
        self.address = str(folder / "preload.sock")
        self.problem = ""
        """Why it is not started again."""
        self._modules = modules
        self._without = without
        named = {name: text for name, text in environment.items() if name in ENVIRONMENT or name.startswith(_LIBRARIES)}
        # more threads of libraries could not be forked
        self._environment = named | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at: deque[float] = deque(maxlen=MAX_STARTS)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(self.address)
        self._listening.listen(64)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @property
    def pid(self) -> int:
        """Process id of the last one that was started; 0 without one."""
        return 0 if self._process is None else self._process.pid

    def forked(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> ForkedProcess:
        """A process that runs a module. `options`: of ForkedProcess."""
        self.start()
        return ForkedProcess(self.address, module, arguments, environment, preload=self, **options)

    def check(self) -> None:
        """Start it again if it has ended, or for the first time if another process waits for it."""
        if self._process is not None or select.select([self._listening], [], [], 0)[0]:
            self.start()

    def start(self) -> None:
        """Start it unless it runs, or has ended too often."""
        if self.problem or (self._process is not None and self._process.poll() is None):
            return
        now = time.monotonic()
        if len(self._started_at) == MAX_STARTS and now - self._started_at[0] < WINDOW_S:
            assert self._process is not None
            code = self._process.returncode
            self.problem = f"the process that forks it ended {MAX_STARTS} times in a row with exit code {code}"
            return
        self._started_at.append(now)
        descriptor = self._listening.fileno()
        without = (f"-{package}" for package in self._without)
        command = python("lorikeet.proto.preload", str(descriptor), *self._modules, *without, " " * _TITLE_BYTES)
        self._process = subprocess.Popen(
            tethered(command), env=self._environment, pass_fds=[descriptor], stdin=subprocess.DEVNULL, process_group=0
        )

    def end(self) -> None:
        """End it. What it has forked goes on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._listening.close()


def reap_adopted(pids: Sequence[int]) -> None:
    """Let the system forget processes that have ended and that this one adopted. `pids`: its own children."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in pids:
                return
            os.waitpid(ended.si_pid, 0)


def main() -> None:
    """Import, then fork until the parent ends."""
    parent_pid = os.getppid()
    end_with_parent()
    listening = socket.socket(fileno=int(sys.argv[1]))
    # the filters that modules set stay for forked processes
    show, warnings.showwarning = warnings.showwarning, lambda *_, **__: None
    gc.disable()  # collections during imports take a fifth of their time, and free almost nothing
    _import(sys.argv[2:-1])
    warnings.showwarning = show
    return_freed_memory()
    gc.freeze()  # a collection would write to pages that the children share
    gc.enable()
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{num_threads} threads run after imports, so that no process can be forked")
    while True:
        connection = listening.accept()[0]
        with connection:
            _fork(connection, listening, parent_pid)


def _import(words: Sequence[str]) -> None:
    """Import modules as if the packages with a `-` were not installed. `import` finds None for them meanwhile."""
    hidden = {word[1:]: None for word in words if word.startswith("-") and word[1:] not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    for word in words:
        if not word.startswith("-"):
            importlib.import_module(word)
    for package in hidden:
        del sys.modules[package]


def _fork(connection: socket.socket, listening: socket.socket, parent_pid: int) -> None:
    """Fork what a connection asks for. The caller has left if it sends nothing."""
    message, descriptors = _received(connection)
    if not message:
        return
    between = os.fork()
    if between == 0:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        listening.close()
        _run(connection, json.loads(message), descriptors, between, parent_pid)
    for descriptor in descriptors:
        os.close(descriptor)
    os.waitpid(between, 0)


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    connection.settimeout(REQUEST_S)
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 64)
    except OSError:
        return b"", []
    connection.settimeout(None)
    return message, list(descriptors)


def _run(
    connection: socket.socket, request: dict[str, Any], descriptors: list[int], between: int, parent_pid: int
) -> NoReturn:
    """Become the process that was asked for."""
    code = 1
    try:
        os.setpgid(0, 0)
        while os.getppid() == between:
            time.sleep(0.001)
        signal_at_parent_death()
        connection.send(json.dumps({"pid": os.getpid()}).encode())
        if os.getppid() == parent_pid and connection.recv(16):
            connection.close()
            _set_up(request, descriptors)
            code = exit_code(request["module"])
    finally:
        os._exit(code)


def _set_up(request: dict[str, Any], descriptors: list[int]) -> None:
    """Standard streams, descriptors, environment and arguments as after `python -m MODULE ARGUMENT…`."""
    high = [os.dup(descriptor) for descriptor in descriptors[_STANDARD:]]  # numbers below may be needed
    for number, descriptor in enumerate(descriptors[:_STANDARD]):
        os.dup2(descriptor, number)
    with os.fdopen(high[0], "rb") as texts:
        texts.seek(0)
        environment = json.loads(texts.read())
    targets = request["inherits"]
    moved = [_above(descriptor, max([*targets, 0])) for descriptor in high[1:]]
    for descriptor in (*descriptors, *high[1:]):
        with contextlib.suppress(OSError):
            if descriptor >= _STANDARD:
                os.close(descriptor)
    for descriptor, target in zip(moved, targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [request["module"], *request["arguments"]]
    set_title(["python", "-m", request["module"], *request["arguments"]])


def _above(descriptor: int, least: int) -> int:
    """A copy of a descriptor with a number above `least`."""
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least + 1)


def set_title(command: Sequence[str]) -> None:
    """Have `ps` show another command."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        text = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def exit_code(module: str) -> int:
    """Run a module as `python -m` does."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code: Any = 0
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        code = 0 if code is None else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
