"""The processes that check grammars, as the router's event loop uses them."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import orjson

from lorikeet.router.text.grammar_process import MAX_ANSWER_BYTES, READY

_STARTING_S = 60.0
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")
_NICENESS = 14
"""Leaves 96 % of a core to a thread of niceness 0, and gets the rest."""


class CheckerEnded(Exception):
    """The process ended while it checked a grammar: it needed too much time or memory."""


class NoCheckers(Exception):
    """The message says why no grammar can be checked."""


class Checker:
    """One process that checks one grammar at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._reader, self._writer, self._pid = reader, writer, pid
        self.is_reusable = True
        """Whether it may check another grammar."""

    @classmethod
    async def connected(cls, connection: socket.socket) -> Self:
        """The process at the other end. Raises NoCheckers."""
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_ANSWER_BYTES + 1)
        line = await reader.readline()
        if not line.endswith(b"\n"):
            writer.close()
            raise NoCheckers("no process can be forked")
        return cls(reader, writer, int(line))

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, as far as is known."""
        return self._reader.at_eof()

    async def ask(self, question: bytes) -> None:
        """Begin to check a grammar: a JSON list of its kind and its value."""
        self._writer.write(question + b"\n")
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def answer(self) -> dict[str, str]:
        """`grammar` or `error`. Raises CheckerEnded."""
        try:
            line = await self._reader.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise CheckerEnded
        answer: dict[str, str] = orjson.loads(line)
        return answer

    def step_back(self) -> None:
        """Run behind all other processes from now on."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._pid, _NICENESS)

    def close(self) -> None:
        """End the process, also in the middle of a check."""
        if not self.has_ended:  # else its id may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._writer.close()


class Checkers:
    """Forks checkers. Its own process starts with the first one, and again where it ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def fork(self) -> Checker:
        """Raises NoCheckers."""
        async with self._lock:
            await self._ensure_started()
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with theirs:
                try:
                    assert self._control is not None
                    socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                except OSError:
                    ours.close()
                    raise NoCheckers("their process has ended") from None
        return await Checker.connected(ours)

    async def start(self) -> None:
        """Start their process where it does not run, which may take seconds. Raises NoCheckers."""
        async with self._lock:
            await self._ensure_started()

    async def _ensure_started(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            await self._start()

    async def _start(self) -> None:
        # not in another thread: the child ends with the thread that started it
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module, number = "lorikeet.router.text.grammar_process", theirs.fileno()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own watches children that must be awaited
                [sys.executable, "-m", module, str(number), str(self._folder)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        ours.settimeout(_STARTING_S)
        self._control = ours
        try:
            problem = (await asyncio.to_thread(ours.recv, 1024)).decode()
        except OSError:
            problem = ""
        if problem != READY:
            self.close()
            raise NoCheckers(problem or "their process does not start")

    def close(self) -> None:
        """End it, and its checkers with it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
