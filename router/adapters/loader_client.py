"""The loader's process as the router sees it: a private Unix socket with one JSON object per line each way.

Connects, and connects again when the process was replaced. Moves calls and answers; what is asked, and what becomes
of an answer, is `loading`'s matter.
"""

import asyncio
import contextlib
import itertools
from typing import Any

import orjson
import structlog

from lorikeet.adapters.errors import LoaderFailed, from_dict
from lorikeet.router.requests.adapter_ref import Loaded

log = structlog.get_logger()

LONGEST_LINE = 4 << 20
CONNECT_SECONDS = 30.0
"""A call that found no loader for so long fails."""
_RETRY_SECONDS = 0.1


class LoaderLost(LoaderFailed):
    """The loader's process went away, or never came."""

    status = 503
    retry_after = 1.0


class Call:
    """One question under way."""

    def __init__(self, number: int, body: dict[str, Any], answer: "asyncio.Future[dict[str, Any]]") -> None:
        self.number = number
        self.body = body
        self.answer = answer
        self.timer: asyncio.TimerHandle | None = None


class LoaderClient:
    """Keeps one connection to the loader for as long as `run` runs."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        """Without an answer yet, sent or not."""
        self._held: set[str] = set()
        self._writer: asyncio.StreamWriter | None = None

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path, limit=LONGEST_LINE)
            except OSError:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            log.info("loader_connected")
            self._writer = writer
            for digest in self._held:  # another one knows nothing of it
                self.say({"hold": digest})
            for call in self._calls.values():
                self._send(call)
            try:
                await self._read(reader)
            except (OSError, ValueError, KeyError) as error:
                log.warning("loader_not_understood", kind=type(error).__name__)
            finally:
                self._writer = None
                writer.close()
                self._lose()
            log.warning("loader_lost")

    def ask(self, body: dict[str, Any]) -> Call:
        """Ask now, or as soon as there is a loader. The answer raises AdapterError."""
        loop = asyncio.get_running_loop()
        call = Call(next(self._numbers), body, loop.create_future())
        self._calls[call.number] = call
        call.answer.add_done_callback(lambda _: self._forget(call))
        if self._writer is not None:
            self._send(call)
        else:
            call.timer = loop.call_later(CONNECT_SECONDS, self._no_loader, call)
        return call

    def cancel(self, call: Call) -> None:
        """Nobody waits for it any more."""
        if not call.answer.done():
            call.answer.cancel()
            self.say({"cancel": call.number})

    def urgent(self, call: Call) -> None:
        """A request has waited long for it."""
        self.say({"urgent": call.number})

    def hold(self, digest: str) -> None:
        """Have a content stay on disk, whichever loader is there."""
        self._held.add(digest)
        self.say({"hold": digest})

    def release(self, digest: str) -> None:
        """Let it go when room is needed."""
        self._held.discard(digest)
        self.say({"release": digest})

    def say(self, body: dict[str, Any]) -> None:
        """A call whose answer nobody waits for."""
        if self._writer is not None:
            self._write(next(self._numbers), body)

    def _send(self, call: Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        self._write(call.number, call.body)

    def _write(self, number: int, body: dict[str, Any]) -> None:
        assert self._writer is not None
        with contextlib.suppress(OSError):
            self._writer.write(orjson.dumps({"call": number, **body}) + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = orjson.loads(line)
            call = self._calls.get(answer["call"])
            if call is None or call.answer.done():
                continue
            error = answer.get("error")
            if error is not None:
                call.answer.set_exception(from_dict(error))
            else:
                call.answer.set_result(answer)

    def _no_loader(self, call: Call) -> None:
        if not call.answer.done():
            call.answer.set_exception(LoaderLost("the adapter loader is not there"))

    def _lose(self) -> None:
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.set_exception(LoaderLost("the adapter loader ended while it was at work"))

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.number, None)
        if call.timer is not None:
            call.timer.cancel()
        if not call.answer.cancelled():
            call.answer.exception()  # looked at, so that asyncio does not warn where nobody waits


def loaded(answer: dict[str, Any]) -> Loaded:
    """Read an answer to `fetch` or `merge`. Raises LoaderFailed."""
    try:
        return Loaded(
            str(answer["digest"]),
            int(answer["num_bytes"]),
            int(answer["rank"]),
            str(answer["tier"]),
            int(answer.get("num_heads", 0)),
        )
    except (KeyError, TypeError, ValueError):
        raise LoaderFailed("the adapter loader's answer could not be read") from None
