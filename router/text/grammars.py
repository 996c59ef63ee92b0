"""Serializes grammars for shards, after a process has checked them: one that takes long fails alone.

A check runs at normal priority at first, and callers take turns. One that takes longer steps back behind all other work
and leaves its turn to others.
"""

import asyncio
import contextlib
import hashlib
import json
import socket
import subprocess
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from lorikeet.proto.children import Forked, ForkServer, ProcessEnded
from lorikeet.proto.process import limited_environment, lower_priority
from lorikeet.proto.shares import Turns
from lorikeet.router.errors import Overloaded, ValidationError
from lorikeet.router.text.grammar_process import MAX_ANSWER_BYTES, PROCESSOR_S

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
        module, environment = "lorikeet.router.text.grammar_process", limited_environment()
        super().__init__(module, str(folder), start_s=_STARTING_S, env=environment, stdout=subprocess.DEVNULL)
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


NUM_FAST = 2
"""Checks that run at normal priority at once."""
FAST_S = 0.1
"""Seconds that a check may run at normal priority."""
SLOW_CALLER_S = 60.0
"""So long after a slow check the checks of its caller step back at once."""
MAX_SLOW, MAX_SLOW_OF_CALLER = 6, 2
"""Most checks that have stepped back, of all callers and of one."""
SLOW_S = 15.0
"""Time limit of a check that has stepped back; its processor time has a limit too."""
QUEUE_S = 5.0
IDLE_S = 30.0
"""Seconds without a check after which the processes end. They take 40 MiB, and start again in half a second."""
MAX_KEPT_BYTES = 16 << 20
"""Maximum bytes of the serialized grammars and refusals that are kept, least recently used first to go."""
_MAX_CALLERS = 4096


@dataclass(eq=False)
class _Check:
    """A check that is running, and the requests that wait for it."""

    task: "asyncio.Task[dict[str, str]]"
    num_waiting: int = 0


class Grammars:
    """Grammar checks of one router. Keeps the newest results."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the model's."""
        self._checkers = Checkers(folder)
        self._idle: list[Checker] = []
        self._turns: Turns[asyncio.Future[None]] = Turns()
        self._num_fast = 0
        self._slow: Counter[str] = Counter()
        """Checks that have stepped back, by caller."""
        self._slow_callers: OrderedDict[str, float] = OrderedDict()
        self._kept: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[tuple[str, bytes], _Check] = {}
        """Checks by caller and grammar."""
        self._resting: asyncio.TimerHandle | None = None
        """Ends the processes."""

    async def serialize(self, kind: str, value: Any, field: str, caller: str) -> str:
        """The grammar as shards take it. Raises ValidationError for one that llguidance refuses, with its reason, and
        Overloaded where the grammars of other callers leave no room.
        """
        question = json.dumps([kind, value]).encode()
        key = hashlib.sha256(question).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            answer = self._kept[key]
        else:
            answer = await self._shared(key, question, caller)
            if "refused" in answer:
                raise ValidationError(f"`{field}` {answer['refused']}", field)
            self._keep(key, answer)
        if "error" in answer:
            raise ValidationError(f"`{field}` is not supported: {answer['error']}", field)
        return answer["grammar"]

    def close(self) -> None:
        """End the processes. They start again with the next check."""
        self._keep_processes()
        while self._idle:
            self._idle.pop().close()
        self._checkers.close()

    def _keep_processes(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def _keep(self, key: bytes, answer: dict[str, str]) -> None:
        if key not in self._kept:
            self._kept[key] = answer
            self._num_bytes += _size(answer)
        while self._num_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._num_bytes -= _size(self._kept.popitem(last=False)[1])

    async def _shared(self, key: bytes, question: bytes, caller: str) -> dict[str, str]:
        """One check for all requests of a caller that have the same grammar; it ends when the last of them leaves."""
        self._keep_processes()
        running = self._running.get((caller, key))
        if running is None:
            running = self._running[caller, key] = _Check(asyncio.ensure_future(self._check(question, caller)))
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting:
                del self._running[caller, key]
                running.task.cancel()
                await asyncio.gather(running.task, return_exceptions=True)
                if not self._running:
                    self._keep_processes()
                    self._resting = asyncio.get_running_loop().call_later(IDLE_S, self.close)

    async def _check(self, question: bytes, caller: str) -> dict[str, str]:
        """The answer of a process, or `refused`, why there is none."""
        try:
            await self._checkers.ensure_started()  # before anybody's turn, whose time is that of a check
            if time.monotonic() - self._slow_callers.get(caller, -SLOW_CALLER_S) < SLOW_CALLER_S:
                async with self._checker() as checker:
                    await checker.ask(question)
                    answer = await self._slowly(checker, caller)
            else:
                answer = await self._fast(question, caller)
        except NoCheckers as error:
            return {"refused": f"is not supported: {error}"}
        except CheckerEnded:
            return {"refused": f"is too complex: checking it takes more than {PROCESSOR_S} s, or too much memory"}
        return answer

    async def _fast(self, question: bytes, caller: str) -> dict[str, str]:
        """At normal priority as long as that is short."""
        async with contextlib.AsyncExitStack() as running:
            async with self._turn(caller):
                checker = await running.enter_async_context(self._checker())
                await checker.ask(question)
                answer = asyncio.ensure_future(checker.answer())
                try:
                    done, _ = await asyncio.wait([answer], timeout=FAST_S)
                except BaseException:
                    answer.cancel()
                    raise
            if done:
                return answer.result()
            self._slow_callers[caller] = time.monotonic()
            self._slow_callers.move_to_end(caller)
            while len(self._slow_callers) > _MAX_CALLERS:
                self._slow_callers.popitem(last=False)
            return await self._slowly(checker, caller, answer)

    async def _slowly(
        self, checker: Checker, caller: str, answer: "asyncio.Future[dict[str, str]] | None" = None
    ) -> dict[str, str]:
        """Behind all other work. Raises Overloaded where too many checks do so, or where the machine is too busy."""
        checker.step_back()
        checker.is_reusable = False
        if answer is None:
            answer = asyncio.ensure_future(checker.answer())
        try:
            if self._slow.total() >= MAX_SLOW or self._slow[caller] >= MAX_SLOW_OF_CALLER:
                raise Overloaded
            self._slow[caller] += 1
            try:
                async with asyncio.timeout(SLOW_S):
                    return await answer
            except TimeoutError:
                raise Overloaded from None
            finally:
                self._slow[caller] -= 1
                self._slow += Counter()  # forgets callers without any
        finally:
            answer.cancel()

    @contextlib.asynccontextmanager
    async def _turn(self, caller: str) -> AsyncIterator[None]:
        """One of the checks at normal priority. Raises Overloaded after QUEUE_S."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.push(caller, turn, 1.0)
        self._admit()
        try:
            done, _ = await asyncio.wait([turn], timeout=QUEUE_S)
            if not done:
                raise Overloaded
            yield
        finally:
            if not self._turns.remove(caller, turn):
                self._num_fast -= 1
                self._admit()

    def _admit(self) -> None:
        while len(self._turns) and self._num_fast < NUM_FAST:
            self._num_fast += 1
            self._turns.pop().set_result(None)

    @contextlib.asynccontextmanager
    async def _checker(self) -> AsyncIterator[Checker]:
        """One that is free; it is kept for the next check, or ended where that was not fast."""
        while self._idle and self._idle[-1].has_ended:
            self._idle.pop().close()
        checker = self._idle.pop() if self._idle else await self._checkers.checker()
        is_good = False
        try:
            yield checker
            is_good = checker.is_reusable
        finally:
            if is_good and len(self._idle) < NUM_FAST:
                self._idle.append(checker)
            else:
                checker.close()


def _size(answer: dict[str, str]) -> int:
    return 200 + sum(map(len, answer.values()))
