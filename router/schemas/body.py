"""Reads the body of a request as a JSON object: media type, encoding, size, time, UTF-8 and syntax.

All bodies have one budget of bytes: what is read, decoded and parsed is counted before it is allocated. A body that
does not fit waits, and is rejected if nothing becomes free in time. One caller holds at most a quarter. Large bodies
leave an eighth free, of all and of each caller's share, so that small ones do not wait for them.
"""

import asyncio
import re
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from lorikeet.proto.config_file import whole_number
from lorikeet.proto.process import return_freed_memory
from lorikeet.router.errors import (
    BadContentEncoding,
    BodyMemoryFull,
    BodyTimeout,
    BodyTooDetailed,
    BodyTooLarge,
    NotJson,
    UnsupportedContentEncoding,
    WrongJsonType,
    WrongMediaType,
)
from lorikeet.router.http_protocol import header

_JSON_MEDIA_TYPE = re.compile(r"application/(?:[\w.!#$&^-]+\+)?json\s*(?:;|$)", re.IGNORECASE)

OFF_LOOP_BYTES = 256 * 1024
"""Above this size a body is parsed in a thread."""
MIN_BYTES_PER_S = 8 * 1024
"""Average rate at which a body has to arrive, after a grace period."""
_DECODED_STEPS = (32 * 1024, 1024 * 1024)
"""Bytes that are decoded at once: the first step, and the longest."""
_GZIP_WINDOW = 31
"""zlib's number for gzip with the largest window."""

_COSTS = {b",": 40, b"[": 64, b"{": 800, b'"': 28}
"""Bytes of memory that a parsed value takes, by the character that announces it; of an object with its model."""
_PIECE_BYTES = 64 * 1024
"""How much of a large body is examined without a break for other threads."""


MAX_WAIT_S = 10.0
MAX_WAITING_PER_CALLER = 16
SMALL_BYTES = 64 * 1024
"""Up to this size a body may use the part of the memory that is kept free."""

SETTLED_BYTES = 256 * 1024
"""Up to this size a body is no longer counted once its request is validated."""


RETURNED_BYTES = 16 * 1024 * 1024
"""After this many bytes of large bodies are freed, the C library returns freed memory to the system."""
RETURN_AFTER_S = 5.0
"""Seconds until it does so, once for all that is freed meanwhile."""


class BodyMemory:
    """The budget of one router."""

    def __init__(self, max_bytes: int, max_wait_s: float | None = None) -> None:
        """A body waits for `max_wait_s` at most, MAX_WAIT_S by default."""
        self._max_bytes = max_bytes
        self._max_per_caller = max_bytes // 4
        self.max_per_body = _for_large(self._max_per_caller)
        """What one body and its values may take."""
        self._max_wait_s = MAX_WAIT_S if max_wait_s is None else max_wait_s
        self._used = 0
        self._used_by: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []
        self._num_freed = 0
        """Bytes of large bodies since freed memory was last returned."""
        self._returning: asyncio.TimerHandle | None = None

    @property
    def num_used(self) -> int:
        """Bytes in use."""
        return self._used

    @property
    def num_waiting(self) -> int:
        """Bodies that wait."""
        return len(self._waiting)

    def body(self, caller: str) -> "BodyCharge":
        """The charge of one body of `caller`, empty at first."""
        return BodyCharge(self, caller)

    async def take(self, charge: "BodyCharge", num_bytes: int) -> None:
        """Add to `charge`. Raises BodyMemoryFull, and BodyTooDetailed where it could never fit."""
        if charge.size + num_bytes > self.max_per_body:
            raise BodyTooDetailed(self.max_per_body)
        if self._fits(charge, num_bytes):
            self._add(charge, num_bytes)
            return
        if sum(waiter.charge.caller == charge.caller for waiter in self._waiting) >= MAX_WAITING_PER_CALLER:
            raise BodyMemoryFull()
        waiting = _Waiting(charge, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiting.granted
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self.give_back(charge, num_bytes)
            raise (BodyMemoryFull() if isinstance(error, TimeoutError) else error) from None

    def give_back(self, charge: "BodyCharge", num_bytes: int) -> None:
        """Reduce `charge`, and let others in."""
        if charge.size > SMALL_BYTES:
            self._freed(num_bytes)
        self._add(charge, -num_bytes)
        for waiting in list(self._waiting):
            if self._fits(waiting.charge, waiting.num_bytes):
                self._waiting.remove(waiting)
                self._add(waiting.charge, waiting.num_bytes)
                waiting.granted.set_result(None)

    def _freed(self, num_bytes: int) -> None:
        """Bodies arrive in pieces, which the C library would keep for ever where a piece in use lies behind them."""
        self._num_freed += num_bytes
        if self._num_freed >= RETURNED_BYTES and self._returning is None:
            self._returning = asyncio.get_running_loop().call_later(RETURN_AFTER_S, self._return)

    def _return(self) -> None:
        self._num_freed, self._returning = 0, None
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    def _fits(self, charge: "BodyCharge", num_bytes: int) -> bool:
        limit, share = self._max_bytes, self._max_per_caller
        if charge.size + num_bytes > SMALL_BYTES:
            limit, share = _for_large(limit), _for_large(share)
        return self._used + num_bytes <= limit and self._used_by[charge.caller] + num_bytes <= share

    def _add(self, charge: "BodyCharge", num_bytes: int) -> None:
        charge.size += num_bytes
        self._used += num_bytes
        self._used_by[charge.caller] += num_bytes
        if not self._used_by[charge.caller]:
            del self._used_by[charge.caller]


def _for_large(num_bytes: int) -> int:
    """The part of a limit that large bodies may use."""
    return num_bytes - num_bytes // 8


class BodyCharge:
    """What one body holds of the budget."""

    def __init__(self, memory: BodyMemory, caller: str) -> None:
        self.caller = caller
        self.size = 0
        """Bytes."""
        self.num_text = 0
        """Bytes of the body itself, without the cost of its values."""
        self._memory = memory

    async def resize(self, num_bytes: int) -> None:
        """Hold `num_bytes` from now on, waiting for them if need be. Raises what `BodyMemory.take` raises."""
        if num_bytes > self.size:
            await self._memory.take(self, num_bytes - self.size)
        else:
            self.shrink(num_bytes)

    def settle(self) -> None:
        """The request is validated: what is left of its body are texts, and not worth counting where it was short."""
        self.shrink(self.num_text if self.num_text > SETTLED_BYTES else 0)

    def shrink(self, num_bytes: int) -> None:
        """Hold at most `num_bytes`."""
        if num_bytes < self.size:
            self._memory.give_back(self, self.size - num_bytes)


@dataclass(eq=False)
class _Waiting:
    charge: BodyCharge
    num_bytes: int
    granted: "asyncio.Future[None]"


class BodyReader:
    """Reads the bodies of one router."""

    def __init__(self, max_bytes: int, memory: BodyMemory, grace_s: float) -> None:
        """`max_bytes` limits one body, as sent and decoded; within `grace_s` a body may arrive at any rate."""
        self._max_bytes = max_bytes
        self._memory = memory
        self._grace_s = grace_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="body")

    async def read(self, request: Request, caller: str) -> dict[str, Any]:
        """The body as a JSON object; `request.state.body_charge` is what it holds of the memory.

        Raises one leaf of BodyRejected, BodyMemoryFull, or ClientDisconnect.
        """
        if not _JSON_MEDIA_TYPE.match(header(request.scope, b"content-type") or ""):
            raise WrongMediaType()
        given = header(request.scope, b"content-encoding")
        encoding = "identity" if given is None else given.strip().lower()
        if encoding not in ("identity", "gzip", "x-gzip"):
            raise UnsupportedContentEncoding(encoding[:64])
        charge = request.state.body_charge = self._memory.body(caller)
        body = await self._received(request, charge)
        if encoding != "identity":
            body = await self._decoded(body, charge)
        value = await self._parsed(body, charge)
        if not isinstance(value, dict):
            raise WrongJsonType(f"invalid type: {kind_of(value)}, expected a JSON object")
        return value

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    async def _received(self, request: Request, charge: BodyCharge) -> bytes:
        """Collect the body without holding more than the limit. The declared length is counted at once."""
        if (declared := header(request.scope, b"content-length")) is not None:
            num_bytes = whole_number(declared, 0, self._max_bytes)
            if num_bytes is None:
                raise BodyTooLarge()
            await charge.resize(num_bytes)
        parts: list[bytes] = []
        size, waited_s, more = 0, 0.0, True
        loop = asyncio.get_running_loop()
        while more:
            began_at = loop.time()
            try:
                async with asyncio.timeout(self._grace_s + size / MIN_BYTES_PER_S - waited_s):
                    message = await request.receive()
            except TimeoutError:
                raise BodyTimeout() from None
            waited_s += loop.time() - began_at
            if message["type"] == "http.disconnect":
                raise ClientDisconnect()
            part = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(part)
            if size > self._max_bytes:
                raise BodyTooLarge()
            if size > charge.size:
                await charge.resize(size)
            parts.append(part)
        return b"".join(parts)

    async def _decoded(self, body: bytes, charge: BodyCharge) -> bytes:
        """`body` without gzip, one member. Raises BodyTooLarge above the limit."""
        parts: list[bytes] = []
        size, rest, decoder = 0, body, zlib.decompressobj(_GZIP_WINDOW)
        step, longest = _DECODED_STEPS
        while True:
            await charge.resize(len(rest) + size + step)
            try:
                part: bytes = await self._in_thread(decoder.decompress, rest, step)
            except zlib.error:
                raise BadContentEncoding("it is not valid") from None
            parts.append(part)
            size, step = size + len(part), min(2 * step, longest)
            if size > self._max_bytes:
                raise BodyTooLarge()
            if decoder.eof:
                break
            rest = decoder.unconsumed_tail
            if not part and not rest:
                raise BadContentEncoding("it ends too early")
        if decoder.unused_data:
            raise BadContentEncoding("more follows after its end")
        charge.shrink(size)
        return b"".join(parts)

    async def _parsed(self, body: bytes, charge: BodyCharge) -> Any:
        most = self._memory.max_per_body - len(body)
        is_small = len(body) <= OFF_LOOP_BYTES
        size = _values_size(body, most) if is_small else await self._in_thread(_values_size, body, most)
        await charge.resize(len(body) + size)
        charge.num_text = len(body)
        try:
            return orjson.loads(body) if is_small else await self._in_thread(orjson.loads, body)
        except orjson.JSONDecodeError as error:
            # The exception object holds the whole document, so only its text is kept.
            raise NotJson(str(error)) from None

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _values_size(body: bytes, most: int) -> int:
    """Bytes of memory of the parsed values, in addition to their texts. Raises BodyTooDetailed above `most`.

    The first figure counts characters inside texts too; only where it is above `most` they are left out.
    """
    pieces = range(0, len(body), _PIECE_BYTES)
    size = sum(_cost(body, start, start + _PIECE_BYTES) for start in pieces)
    if size > most:
        size = _exact_values_size(body, most)
    if size > most:
        raise BodyTooDetailed(most + len(body))
    return size


def _cost(body: bytes, start: int, end: int) -> int:
    return sum(cost * body.count(character, start, end) for character, cost in _COSTS.items())


def _exact_values_size(body: bytes, most: int) -> int:
    """Bytes of memory of the parsed values without characters inside texts; it ends early above `most`."""
    size, is_in_text, position = 0, False, 0
    while position < len(body) and size <= most:
        piece = body[position : position + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # no piece ends inside an escape sequence
            piece = body[position : position + _PIECE_BYTES + 1]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_in_text::2])
        size += _cost(outside, 0, len(outside)) + _COSTS[b'"'] * (len(parts) - 1)
        is_in_text ^= len(parts) % 2 == 0
        position += len(piece)
    return size


def kind_of(value: object) -> str:
    """How serde names a value of the wrong type."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{value}`"
        case str():
            shown = value if len(value) <= 64 else value[:64] + "…"
            return f'string "{shown}"'
        case list():
            return "sequence"
    return "map"
