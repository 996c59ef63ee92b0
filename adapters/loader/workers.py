"""Worker processes as the loader's event loop uses them: start, call, change priority, end.

`jobs` decides which job is next.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from lorikeet.adapters.errors import AdapterChanged, AdapterError, AdapterInvalid, LoaderFailed, from_dict
from lorikeet.adapters.loader import process

MAX_LINE_BYTES = 4 << 20
_STARTING_S = 300.0


class WorkerExited(Exception):
    """A worker's process ended before it answered a job."""

    def __init__(self, status: int, was_idle: bool) -> None:
        super().__init__(f"exited with {status}")
        self.status = status
        """Exit code, negative for a signal."""
        self.was_idle = was_idle
        """Whether it waited for a job after an earlier one. It did not start this one."""

    def as_error(self, name: str) -> AdapterError:
        """The error for the adapter that the worker was processing."""
        if self.status == -signal.SIGPROF:
            problem = "reading its adapter_config.json takes too much processor time; check its patterns"
            return AdapterInvalid(f"the adapter {name} cannot be served: {problem}")
        if self.status == -signal.SIGABRT:  # how libraries in Rust end where there is no memory
            problem = "reading it needs more memory than its size explains"
            return AdapterInvalid(f"the adapter {name} cannot be served: {problem}")
        if self.status == -signal.SIGBUS:
            return AdapterChanged(f"the files of the adapter {name} changed while they were read")
        return LoaderFailed(f"the loader's worker exited while it read {name} ({self.status})", status=503)


class Worker:
    """One process, for one job at a time."""

    def __init__(self, fork_server: "ForkServer", pid: int, connection: socket.socket, steps_back: bool) -> None:
        self._fork_server, self._pid, self._connection = fork_server, pid, connection
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._steps_back = steps_back
        """Whether it runs at low priority now."""
        self.is_ended = False

    async def call(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises the adapter's error, or WorkerExited."""
        has_worked = self._streams is not None
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._connection, limit=MAX_LINE_BYTES)
        reader, writer = self._streams
        started = b""
        try:
            writer.write(json.dumps(job).encode() + b"\n")
            await writer.drain()
            started = await reader.readline()
            line = await reader.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self.is_ended = True
            writer.close()
            raise WorkerExited(await self._fork_server.status(self._pid), has_worked and not started)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise from_dict(answer["error"])
        return answer

    def raise_priority(self) -> bool:
        """To normal, even in the middle of a job; whether the system permits that."""
        if self._steps_back and process.step_forward(self._pid):
            self._steps_back = False
        return not self._steps_back

    def lower_priority(self) -> None:
        """Below that of all other processes, after a job."""
        if not self._steps_back:
            with contextlib.suppress(OSError):
                process.step_back(self._pid)
                self._steps_back = True

    async def end(self) -> None:
        """End the process in any state."""
        if not self.is_ended:
            self.is_ended = True
            self.kill()
            (self._connection if self._streams is None else self._streams[1]).close()
            await self._fork_server.status(self._pid)

    def kill(self) -> None:
        """Make a running job fail with WorkerExited."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


class ForkServer:
    """The process that forks workers."""

    def __init__(self, config_path: Path) -> None:
        self._config_path = config_path
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that end the workers of cancelled callers."""

    async def start(self) -> tuple[str, str, str]:
        """Returns the base's key in the store. Raises ValueError if the base cannot be read."""
        self._spawn()
        answer = await asyncio.to_thread(self._exchange)
        if "base" not in answer:
            raise ValueError(str(answer.get("failed", "the process that reads adapters did not start")))
        base, weights, dtype = answer["base"]
        return str(base), str(weights), str(dtype)

    async def worker(self, steps_back: bool) -> Worker:
        """A new process. Raises LoaderFailed. A process whose caller is cancelled meanwhile is ended."""
        forking = asyncio.create_task(self._fork(steps_back))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            self._ending.add(ending := asyncio.create_task(_end_forked(forking)))
            ending.add_done_callback(self._ending.discard)
            raise

    async def _fork(self, steps_back: bool) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            answer = await self._call({"fork": {"steps_back": steps_back}}, theirs.fileno())
        ours.setblocking(False)
        return Worker(self, int(answer["pid"]), ours, steps_back)

    async def status(self, pid: int) -> int:
        """Wait for a worker's end and return its exit code."""
        return int((await self._call({"wait": pid}))["status"])

    async def ended(self) -> int:
        """Wait for the fork server's own end, which ends the loader."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    def end(self) -> None:
        """End it, and its workers with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()

    def _spawn(self) -> None:
        # not in another thread: the child must end with this one
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module, descriptor = "lorikeet.adapters.loader.fork_server", theirs.fileno()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(descriptor), str(self._config_path)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        ours.settimeout(_STARTING_S)
        self._control = ours

    async def _call(self, message: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        async def exchange() -> dict[str, Any]:
            async with self._lock:
                return await asyncio.to_thread(self._exchange, message, descriptors)

        # the answer to a caller that is cancelled must not reach the next one
        answer = await asyncio.shield(asyncio.create_task(exchange()))
        if not answer:
            raise LoaderFailed("the process that reads adapters is gone", status=503, retry_after=5.0)
        return answer

    def _exchange(self, message: dict[str, Any] | None = None, descriptors: tuple[int, ...] = ()) -> dict[str, Any]:
        """Send a message, if any, and receive one; {} if the other end is gone."""
        assert self._control is not None
        try:
            if message is not None:
                socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))
            answer: dict[str, Any] = json.loads(self._control.recv(65536) or b"{}")
        except OSError:
            return {}
        return answer


async def _end_forked(forking: "asyncio.Task[Worker]") -> None:
    with contextlib.suppress(LoaderFailed):
        await (await forking).end()
