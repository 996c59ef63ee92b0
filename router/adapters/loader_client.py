"""The client of the adapter loader's process: a private Unix socket with one JSON object per line in each direction.

Connects, and reconnects when the process was replaced.
"""

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from lorikeet.adapters.errors import AdapterInvalid, LoaderFailed, from_dict
from lorikeet.router.requests.adapter_ref import Loaded

log = structlog.get_logger()

LONGEST_LINE = 4 << 20
CONNECT_SECONDS = 30.0
"""A call fails after so long without a connection."""
_RETRY_SECONDS = 0.1


class LoaderLost(LoaderFailed):
    """The loader's process ended, or never started."""

    status = 503
    retry_after = 1.0


@dataclass(eq=False)
class Call:
    """One call without an answer yet."""

    number: int
    body: dict[str, Any]
    answer: "asyncio.Future[dict[str, Any]]"
    timer: asyncio.TimerHandle | None = None


class LoaderClient:
    """Keeps one connection to the loader open while `run` runs."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        """Without an answer yet, sent or not, by number."""
        self._held: set[str] = set()
        self._writer: asyncio.StreamWriter | None = None

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
            for digest in self._held:  # a new process has no holds
                self.notify({"hold": digest})
            for call in self._calls.values():
                self._send(call)
            try:
                await self._read(reader)
            except (OSError, ValueError, KeyError) as error:
                log.warning("loader_answer_malformed", kind=type(error).__name__)
            finally:
                self._writer = None
                writer.close()
                for call in list(self._calls.values()):
                    self._fail(call, "the adapter loader ended during the call")
            log.warning("loader_lost")

    def ask(self, body: dict[str, Any]) -> Call:
        """Send a call now, or once the loader is connected. The answer raises AdapterError."""
        loop = asyncio.get_running_loop()
        call = Call(next(self._numbers), body, loop.create_future())
        self._calls[call.number] = call
        call.answer.add_done_callback(lambda _: self._forget(call))
        if self._writer is not None:
            self._send(call)
        else:
            call.timer = loop.call_later(CONNECT_SECONDS, self._fail, call, "the adapter loader is not running")
        return call

    def cancel(self, call: Call) -> None:
        """Its answer is not needed any more."""
        if not call.answer.done():
            call.answer.cancel()
            self.notify({"cancel": call.number})

    def urgent(self, call: Call) -> None:
        """A request has waited long for it."""
        self.notify({"urgent": call.number})

    def share(self, call: Call, caller: str) -> None:
        """Another caller waits for it too."""
        self.notify({"share": call.number, "caller": caller})

    def verify(self, digest: str) -> None:
        """Compare a stored file with its checksum; it is removed where they differ."""
        self.notify({"verify": digest})

    def hold(self, digest: str) -> None:
        """Keep a content on disk, also after the loader is replaced."""
        self._held.add(digest)
        self.notify({"hold": digest})

    def release(self, digest: str) -> None:
        """Allow its eviction."""
        self._held.discard(digest)
        self.notify({"release": digest})

    def notify(self, body: dict[str, Any]) -> None:
        """Send a call whose answer is not needed."""
        if self._writer is not None:
            self._write(next(self._numbers), body)

    def _send(self, call: Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        try:
            self._write(call.number, call.body)
        except ValueError as error:
            if not call.answer.done():
                call.answer.set_exception(AdapterInvalid(f"the adapter cannot be loaded: {error}"))

    def _write(self, number: int, body: dict[str, Any]) -> None:
        """Raises ValueError for a call that the loader would not read: it fails alone."""
        assert self._writer is not None
        try:
            line = orjson.dumps({"call": number, **body}) + b"\n"
        except TypeError:
            raise ValueError("its name or token is not valid Unicode") from None
        if len(line) > LONGEST_LINE:
            raise ValueError(f"the call has {len(line)} bytes; the limit is {LONGEST_LINE}")
        with contextlib.suppress(OSError):
            self._writer.write(line)

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

    @staticmethod
    def _fail(call: Call, reason: str) -> None:
        if not call.answer.done():
            call.answer.set_exception(LoaderLost(reason))

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.number, None)
        if call.timer is not None:
            call.timer.cancel()
        if not call.answer.cancelled():
            call.answer.exception()  # retrieved, so that asyncio does not warn where nothing awaits it


def loaded(answer: dict[str, Any]) -> Loaded:
    """Parse an answer to `fetch` or `merge`. Raises LoaderFailed."""
    try:
        digest, tier, num_heads = str(answer["digest"]), str(answer["tier"]), int(answer.get("num_heads", 0))
        ids = tuple(map(int, answer.get("invocation_ids", ())))
        return Loaded(digest, int(answer["num_bytes"]), int(answer["rank"]), tier, num_heads, ids)
    except (KeyError, TypeError, ValueError):
        raise LoaderFailed("the adapter loader's answer could not be read") from None
