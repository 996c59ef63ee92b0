"""A scripted adapter loader in the test's own process: it sends the test's answers over a real socket."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lorikeet.adapters.errors import AdapterError

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def digest_of(call: dict[str, Any]) -> str:
    """The digest that this loader returns for a call of `fetch` or `merge`."""
    asked = call.get("fetch") or call.get("merge") or call.get("check")
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


async def finds_all(call: dict[str, Any]) -> dict[str, Any]:
    return {"digest": digest_of(call), "num_bytes": 1000, "rank": 8, "tier": "source"}


@dataclass
class ScriptedLoader:
    """Serves on a Unix socket in `folder` from `async with` on."""

    folder: Path
    answer: Answer = finds_all
    check: Answer = finds_all
    """Answers calls that only validate an adapter."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    """Digests whose files it has removed."""
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, all calls wait."""
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> str:
        return str(self.folder / "loader.sock")

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Calls for content, without their numbers."""
        return [call for call in self.calls if "fetch" in call or "merge" in call]

    async def __aenter__(self) -> Self:
        self.may_answer.set()
        self._server = await asyncio.start_unix_server(self._serve, self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.hang_up()
        for task in list(self._tasks):
            task.cancel()
        await self._server.wait_closed()

    def hang_up(self) -> None:
        """End every connection, as a loader that dies does."""
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                call = json.loads(line)
                self.calls.append(call)
                if call.keys() & {"fetch", "merge", "check", "forget"}:
                    task = asyncio.create_task(self._reply(call, writer))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _reply(self, call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await self.may_answer.wait()
        if "forget" in call:
            self.forgotten.append(call["forget"])
        try:
            answer = {} if "forget" in call else await (self.check if "check" in call else self.answer)(call)
        except AdapterError as error:
            answer = {"error": error.as_dict()}
        if not writer.is_closing():
            writer.write(json.dumps({"call": call["call"], **answer}).encode() + b"\n")
