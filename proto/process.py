"""Processes: this one (its end with the parent, the reason of its failure, open files, freed memory) and its children.

A child is `python -m MODULE`. `Child` is one with a configuration, which the launcher supervises. `LineProcess` answers
lines, and a `ForkServer` forks processes once it has loaded what all of them need. No child outlives the thread that
started it: the kernel ends it, as `tethered` or `end_with_parent` asks.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import structlog

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


def return_freed_memory() -> bool:
    """Return freed memory to the system, which the C library keeps where it lies between blocks in use. Takes
    milliseconds, without the GIL. Returns whether the library can.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    return trim is not None


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


log = structlog.get_logger()

ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")
"""Variables that a child needs to import what its parent does; others may be secrets."""
MAX_STATUSES = 1024


class ProcessEnded(Exception):
    """A child ended before it answered."""


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
    module: str, *arguments: str, kind: socket.SocketKind = socket.SOCK_STREAM, **options: Any
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a child with one end of a socket, whose descriptor is its first argument; returns the other end. Not in a
    thread that ends before the child should. `options` are those of subprocess.Popen.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs:
        command = python(module, str(theirs.fileno()), *arguments)
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, **options)
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


class Child:
    """`python -m MODULE ARGUMENT…` in a new process group, so that a terminal's Ctrl-C reaches the launcher only.

    Standard output and error go to `output`, or to those of this process.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Path | list[str],
        environment: Mapping[str, str],
        output: IO[bytes] | None = None,
        inherits: Sequence[int] = (),
        standard_input: bytes = b"",
        failure_file: Path | None = None,
    ) -> None:
        """`inherits`: file descriptors that stay open in the child; `failure_file`: where it leaves why it fails."""
        self.name = name
        self._failure_file = failure_file
        if failure_file is not None:
            failure_file.unlink(missing_ok=True)
        words = arguments if isinstance(arguments, list) else [str(arguments)]
        self._process = subprocess.Popen(
            tethered(python(module, *words)),
            stdin=subprocess.PIPE if standard_input else subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=dict(environment),
            process_group=0,
            pass_fds=inherits,
        )
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has exited, which the supervisor sees
                self._process.stdin.write(standard_input)
                self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal, as in subprocess."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """How it exited, for a log line."""
        code = self.exit_code
        if code is None:
            return f"{self.name} is running"
        if code < 0:
            return f"{self.name} was ended by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}" + (f" ({self.reason})" if self.reason else "")

    @property
    def reason(self) -> str:
        """Why it failed, in its own words; empty if it did not say."""
        try:
            return "" if self._failure_file is None else self._failure_file.read_text()
        except FileNotFoundError:
            return ""

    def terminate(self) -> None:
        """Ask it to exit."""
        self._send(signal.SIGTERM)

    def reload(self) -> None:
        """Ask a router to reload its files."""
        self._send(signal.SIGHUP)

    def hand_over(self) -> None:
        """Ask a router to finish its requests and accept no new connections."""
        self._send(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill it and the other processes of its group, even after its own exit."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def wait(self, seconds: float) -> bool:
        """Whether it exits within `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _send(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            self._process.send_signal(number)


class LineProcess:
    """A child that answers each line with a line. It is started on demand, and again after it was killed."""

    command: ClassVar[tuple[str, ...]]
    max_line_bytes: ClassVar[int]
    start_s: ClassVar[float] = 20.0
    log_name: ClassVar[str]
    """Prefix of the event that is logged if it does not start."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    def first_line(self) -> bytes:
        """A question that a process answers once it can work."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return limited_environment()

    @property
    def pid(self) -> int | None:
        """Process id, while the process runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def ask(self, line: bytes, seconds: float) -> bytes:
        """The answer to a line. Raises TimeoutError after `seconds`, or ProcessEnded."""
        await self.start()
        return await self.exchange(line, seconds)

    async def exchange(self, line: bytes, seconds: float) -> bytes:
        """The answer of a process that was started. If this raises, or if the caller leaves, the process is killed: a
        late answer must not be taken for the next one.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._exchange(line)
        except BaseException:
            await self._kill()
            raise

    async def start(self) -> None:
        """Start the process if it does not run. Raises ProcessEnded if it does not start twice in a row."""
        if self.pid is None and not await self._try_start() and not await self._try_start():
            raise ProcessEnded("it does not start")

    async def close(self) -> None:
        """Kill the process, if there is one."""
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _try_start(self) -> bool:
        """Start the process. Returns False if it ends or does not answer, and logs its exit status."""
        began, process = time.monotonic(), None
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=pipe,
                stdout=pipe,
                stderr=nothing,
                env=self.environment(),
                limit=self.max_line_bytes,
            )
            await self.exchange(self.first_line(), self.start_s)
        except (TimeoutError, ProcessEnded, OSError) as error:
            status = str(error) if process is None else process.returncode
            seconds = round(time.monotonic() - began, 3)
            log.warning(f"{self.log_name}_not_started", exit_status=status, seconds=seconds)
            return False
        return True

    async def _exchange(self, line: bytes) -> bytes:
        process = self._process
        if process is None:
            raise ProcessEnded
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + b"\n")
            await process.stdin.drain()
            answer = await process.stdout.readline()
        except (OSError, RuntimeError) as error:  # uvloop's for a pipe that is closed is a RuntimeError
            raise ProcessEnded from error
        if not answer.endswith(b"\n"):
            raise ProcessEnded
        return answer


class Forked:
    """A process that was forked: lines to it and from it."""

    def __init__(self, server: "ForkServer", pid: int, connection: socket.socket, max_line_bytes: int) -> None:
        self._server, self._pid, self._connection, self._limit = server, pid, connection, max_line_bytes
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, as far as is known. Its id may be another's then."""
        return self._streams is not None and self._streams[0].at_eof()

    async def send(self, line: bytes) -> None:
        """Send a line; a process that has ended does not answer."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._connection, limit=self._limit)
        with contextlib.suppress(OSError):
            self._streams[1].write(line + b"\n")
            await self._streams[1].drain()

    async def receive(self) -> bytes:
        """A line. Raises ProcessEnded."""
        assert self._streams is not None
        line = b""
        with contextlib.suppress(OSError):
            line = await self._streams[0].readline()
        if not line.endswith(b"\n"):
            raise ProcessEnded
        return line

    async def status(self) -> int:
        """Wait for the end of the process and return its exit code, negative for a signal."""
        return await self._server.status(self._pid)

    def kill(self) -> None:
        """End the process, also in the middle of its work."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection."""
        (self._connection if self._streams is None else self._streams[1]).close()


class ForkServer:
    """A child that forks processes."""

    def __init__(self, module: str, *arguments: str, start_s: float, **options: Any) -> None:
        """`options` are those of subprocess.Popen."""
        self._module, self._arguments, self._start_s, self._options = module, arguments, start_s, options
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> dict[str, Any]:
        """Start it, and return what it says first; {} if it ends before."""
        self.close()
        self._process, self._control = start_connected(
            self._module, *self._arguments, kind=socket.SOCK_SEQPACKET, **self._options
        )
        self._control.settimeout(self._start_s)
        return await asyncio.to_thread(self._exchange)

    def ending(self) -> str:
        """Why it did not start, and what to do, for an error."""
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)  # its socket may be closed a moment before
        if code is None:
            return (
                f"did not answer within {self._start_s:g} s: the machine is busy, or its disk is slow; start it again"
            )
        if code < 0:
            name = signal.Signals(-code).name
            return f"was ended by {name}: look for `oom` in the kernel's log (dmesg), and give it more memory"
        return f"ended with exit code {code}: the lines above say why"

    async def fork(self, **options: Any) -> tuple[int, socket.socket]:
        """A new process and the socket to it. Raises ProcessEnded if the server has ended."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                answer = await self._call({"fork": options}, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return int(answer["pid"]), ours

    async def status(self, pid: int) -> int:
        """Wait for the end of a forked process and return its exit code. Raises ProcessEnded."""
        return int((await self._call({"wait": pid}))["status"])

    async def ended(self) -> int:
        """Wait for the server's own end."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    def close(self) -> None:
        """End it, and the processes that it forked with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()
        self._process = self._control = None

    async def _call(self, message: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        async def exchange() -> dict[str, Any]:
            async with self._lock:
                return await asyncio.to_thread(self._exchange, message, descriptors)

        # the answer to a caller that is cancelled must not reach the next one
        answer = await asyncio.shield(asyncio.create_task(exchange()))
        if not answer:
            raise ProcessEnded
        return answer

    def _exchange(self, message: dict[str, Any] | None = None, descriptors: tuple[int, ...] = ()) -> dict[str, Any]:
        """Send a message, if any, and receive one; {} if the other end is gone."""
        if self._control is None:
            return {}
        try:
            if message is not None:
                socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))
            answer: dict[str, Any] = json.loads(self._control.recv(65536) or b"{}")
        except OSError:
            return {}
        return answer


def serve_forks(control: socket.socket, work: Callable[[socket.socket, dict[str, Any]], None]) -> None:
    """Fork processes that do `work`, given the socket of each and the options of its fork, until the other end closes.
    The caller has one thread, so that forking is safe.
    """
    statuses: dict[int, int] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            return
        _reap(statuses)
        call = json.loads(message)
        if "wait" in call:
            answer(control, {"status": _status(call["wait"], statuses)})
            continue
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                control.close()
                end_with_parent()
                work(connection, call["fork"])
                code = 0
            finally:
                os._exit(code)
        connection.close()
        answer(control, {"pid": pid})


def answer(control: socket.socket, message: dict[str, Any]) -> None:
    """Send a message to the client of a fork server."""
    control.send(json.dumps(message).encode())


def _reap(statuses: dict[int, int]) -> None:
    """Record the exit codes of processes that nobody has asked for yet, or ever will."""
    with contextlib.suppress(ChildProcessError):
        while (exited := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[exited[0]] = os.waitstatus_to_exitcode(exited[1])
            if len(statuses) > MAX_STATUSES:
                del statuses[next(iter(statuses))]


def _status(pid: int, statuses: dict[int, int]) -> int:
    if pid in statuses:
        return statuses.pop(pid)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0
