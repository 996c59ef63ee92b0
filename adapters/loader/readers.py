"""The processes that read adapters, as the loader's event loop sees them: started, asked, hastened, ended.

Knows processes and messages; which job is next is for `jobs` to say.
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

import structlog

from lorikeet.adapters.errors import AdapterError, AdapterInvalid, LoaderFailed, from_dict
from lorikeet.adapters.loader import process

log = structlog.get_logger()

LONGEST_LINE = 4 << 20
_STARTING_S = 300.0


class ReaderEnded(Exception):
    """A reader's process ended in the middle of a job."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ended with {status}")
        self.status = status
        """Exit code, negative for a signal."""

    def as_error(self, name: str) -> AdapterError:
        """What that says of the adapter it was at work on."""
        if self.status == -signal.SIGPROF:
            return AdapterInvalid(
                f"the adapter {name} cannot be served: understanding its adapter_config.json takes too much processor "
                "time, as a pattern in it can be made to"
            )
        if self.status == -signal.SIGBUS:
            return AdapterInvalid(f"the adapter {name} cannot be served: its files changed while they were read")
        return LoaderFailed(f"the loader's reader ended while it read {name} ({self.status})", status=503)


class Reader:
    """One process, for one job at a time."""

    def __init__(self, fork_server: "ForkServer", pid: int, connection: socket.socket, steps_back: bool) -> None:
        self._fork_server = fork_server
        self._pid = pid
        self._connection = connection
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.steps_back = steps_back
        """Behind who computes, now."""
        self.is_ended = False

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises the adapter's error, or ReaderEnded."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._connection, limit=LONGEST_LINE)
        reader, writer = self._streams
        try:
            writer.write(json.dumps(job).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self.is_ended = True
            writer.close()
            raise ReaderEnded(await self._fork_server.status(self._pid))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise from_dict(answer["error"])
        return answer

    def hasten(self) -> bool:
        """Give it normal priority, in the middle of its job; whether the system allows that."""
        if self.steps_back and process.step_forward(self._pid):
            self.steps_back = False
        return not self.steps_back

    def rest(self) -> None:
        """After a job: behind everything else again."""
        if not self.steps_back:
            with contextlib.suppress(OSError):
                process.step_back(self._pid)
                self.steps_back = True

    async def end(self) -> None:
        """End the process, whatever it does."""
        if not self.is_ended:
            self.is_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            if self._streams is not None:
                self._streams[1].close()
            else:
                self._connection.close()
            await self._fork_server.status(self._pid)

    def kill(self) -> None:
        """Let the job that is under way fail with ReaderEnded."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


class ForkServer:
    """The process that forks readers."""

    def __init__(self, config_path: Path) -> None:
        self._config_path = config_path
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def start(self) -> tuple[str, str, str]:
        """Returns the base's facts. Raises ValueError where the base cannot be read."""
        self._spawn()
        answer = await asyncio.to_thread(self._hear)
        if "base" not in answer:
            raise ValueError(str(answer.get("failed", "the process that reads adapters did not start")))
        base, weights, dtype = answer["base"]
        return str(base), str(weights), str(dtype)

    async def reader(self, steps_back: bool) -> Reader:
        """A new process. Raises LoaderFailed."""
        ours, theirs = socket.socketpair()
        with theirs:
            answer = await self._ask({"fork": {"steps_back": steps_back}}, theirs.fileno())
        ours.setblocking(False)
        return Reader(self, int(answer["pid"]), ours, steps_back)

    async def status(self, pid: int) -> int:
        """How a reader ended. Waits for its end."""
        return int((await self._ask({"wait": pid}))["status"])

    async def ended(self) -> int:
        """Wait for the nursery's own end: without it there is no loader."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    def end(self) -> None:
        """End it, and its readers with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()

    def _spawn(self) -> None:
        # not in a thread of its own: the child is to end with this one
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "lorikeet.adapters.loader.nursery",
                    str(theirs.fileno()),
                    str(self._config_path),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        ours.settimeout(_STARTING_S)
        self._control = ours

    async def _ask(self, message: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        # a caller that is cancelled must not leave the answer to the next one
        answer = await asyncio.shield(asyncio.create_task(self._in_turn(message, descriptors)))
        if not answer:
            raise LoaderFailed("the process that reads adapters is gone", status=503, retry_after=5.0)
        return answer

    async def _in_turn(self, message: dict[str, Any], descriptors: tuple[int, ...]) -> dict[str, Any]:
        async with self._lock:
            return await asyncio.to_thread(self._exchange, message, descriptors)

    def _exchange(self, message: dict[str, Any], descriptors: tuple[int, ...]) -> dict[str, Any]:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))
        except OSError:
            return {}
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._control is not None
        try:
            heard = self._control.recv(65536)
        except OSError:
            return {}
        found: dict[str, Any] = json.loads(heard) if heard else {}
        return found
