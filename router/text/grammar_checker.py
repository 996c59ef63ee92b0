"""The processes that check grammars, as the router's event loop uses them."""

import asyncio
import contextlib
import socket
import subprocess
from pathlib import Path

import orjson

from lorikeet.proto.process import Forked, ForkServer, ProcessEnded, limited_environment, lower_priority
from lorikeet.router.text.grammar_process import MAX_ANSWER_BYTES

_STARTING_S = 60.0
_NICENESS = 14
"""Leaves 96 % of a core to a thread of niceness 0, and gets the rest."""


class CheckerEnded(Exception):
    """The process ended while it checked a grammar: it needed too much time or memory."""


class NoCheckers(Exception):
    """The message says why no grammar can be checked."""


class Checker(Forked):
    """One process that checks one grammar at a time."""

    def __init__(self, server: ForkServer, pid: int, connection: socket.socket) -> None:
        super().__init__(server, pid, connection, MAX_ANSWER_BYTES + 1)
        self.is_reusable = True
        """Whether it may check another grammar."""

    async def ask(self, question: bytes) -> None:
        """Begin to check a grammar: a JSON list of its kind and its value."""
        await self.send(question)

    async def answer(self) -> dict[str, str]:
        """`grammar` or `error`. Raises CheckerEnded."""
        try:
            answer: dict[str, str] = orjson.loads(await self.receive())
        except ProcessEnded:
            raise CheckerEnded from None
        return answer

    def step_back(self) -> None:
        """Run behind all other processes from now on."""
        with contextlib.suppress(OSError):
            lower_priority(_NICENESS, self._pid)

    def close(self) -> None:
        """End the process, also in the middle of a check."""
        self.kill()
        super().close()


class Checkers(ForkServer):
    """Forks checkers. Its own process starts with the first one, and again if it ended."""

    def __init__(self, folder: Path) -> None:
        module, options = "lorikeet.router.text.grammar_process", {"stdout": subprocess.DEVNULL}
        super().__init__(module, str(folder), start_s=_STARTING_S, env=limited_environment(), **options)
        self._starting = asyncio.Lock()

    async def checker(self) -> Checker:
        """Raises NoCheckers."""
        await self.ensure_started()
        try:
            return Checker(self, *await self.fork())
        except ProcessEnded:
            raise NoCheckers("their process has ended") from None

    async def ensure_started(self) -> None:
        """Start their process if it does not run, which may take seconds. Raises NoCheckers."""
        async with self._starting:
            if self.is_running:
                return
            said = await self.start()
            if "ready" not in said:
                self.close()
                raise NoCheckers(said.get("failed", "their process did not start"))
