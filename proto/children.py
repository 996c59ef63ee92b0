"""Children of a process. `Child` is one with a configuration, which the launcher supervises. `LineProcess` answers
lines, and a `ForkServer` forks processes once it has loaded what all of them need.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import structlog

from lorikeet.proto.preload import ForkedProcess, Preload
from lorikeet.proto.process import end_with_parent, limited_environment, python, start_connected, tethered

log = structlog.get_logger()

MAX_STATUSES = 1024


class ProcessEnded(Exception):
    """A child ended before it answered."""


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
        preload: Preload | None = None,
    ) -> None:
        """`inherits`: file descriptors that stay open in the child; `failure_file`: where it leaves why it fails;
        `preload`: the process that forks it, without `standard_input`.
        """
        self.name = name
        self._failure_file = failure_file
        if failure_file is not None:
            failure_file.unlink(missing_ok=True)
        words = arguments if isinstance(arguments, list) else [str(arguments)]
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if preload is not None:
            descriptor = None if output is None else output.fileno()
            self._process = preload.forked(module, words, environment, output=descriptor, inherits=inherits)
            return
        self._process = process = subprocess.Popen(
            tethered(python(module, *words)),
            stdin=subprocess.PIPE if standard_input else subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=dict(environment),
            process_group=0,
            pass_fds=inherits,
        )
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has exited, which the supervisor sees
                process.stdin.write(standard_input)
                process.stdin.close()

    @property
    def pid(self) -> int:
        """0 before it was forked."""
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
        """Why it failed, in its own words, or why it was not forked; empty if nobody says."""
        if isinstance(self._process, ForkedProcess) and self._process.problem:
            return self._process.problem
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
        if not self.pid:
            self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                os.killpg(self.pid, signal.SIGKILL)
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
                *tethered(self.command),
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

    def __init__(
        self, module: str, *arguments: str, start_s: float, preload: str | None = None, **options: Any
    ) -> None:
        """`preload`: the socket of the process that forks this one; `options` are those of subprocess.Popen."""
        self._module, self._arguments, self._start_s, self._options = module, arguments, start_s, options
        self._preload = preload
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._control: socket.socket | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> dict[str, Any]:
        """Start it, and return what it says first; {} if it ends before."""
        self.close()
        if self._preload is None:
            self._process, control = start_connected(
                self._module, *self._arguments, kind=socket.SOCK_SEQPACKET, **self._options
            )
        else:
            self._process, control = await asyncio.to_thread(self._forked, self._preload)
        control.settimeout(self._start_s)
        self._control = control
        return await asyncio.to_thread(self._exchange)

    def _forked(self, preload: str) -> "tuple[ForkedProcess, socket.socket]":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = (str(theirs.fileno()), *self._arguments)
            environment = self._options.get("env", os.environ)
            process = ForkedProcess(preload, self._module, arguments, environment, inherits=[theirs.fileno()])
            try:
                process.wait_until_forked(self._start_s)
            except subprocess.TimeoutExpired:
                process.kill()
        return process, ours

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
        return f"ended{f' with exit code {code}' if code else ''}: the lines above say why"

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
