"""Answers of resumable requests, kept for a while: a client that lost its connection reads the rest on another one.

Parts are kept as they were sent. A position in the answer is a number of events, because clients count events. Number
and bytes are bounded, in total and per caller. Where there is no room, complete answers that nobody reads are dropped
first, the oldest first. A running stream then drops what its connected readers have, and waits where that is not
enough: its request goes on, and nothing is lost.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from lorikeet.router.errors import StreamExists, StreamNotFound, TooManyStreams

EVENT_END = b"\n\n"
PART_OVERHEAD = 96
"""Bytes that a part takes in addition to its content."""
READ_BYTES = 64 * 1024
"""At most so much is sent at once to a reader that is behind; a part is never divided."""

Headers = list[tuple[bytes, bytes]]


class Trimmed(Exception):
    """A reader asks for events that are not kept any more."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.first = first
        """The first event that is kept."""


class OutOfRange(Exception):
    """A reader asks for events that do not exist yet."""


class StreamReader:
    """One connection's position in a stream. It exists while the connection does."""

    def __init__(self, stream: "KeptStream", first_event: int) -> None:
        """Raises Trimmed or OutOfRange."""
        self.stream = stream
        self.part, self._skipped = stream.find(first_event)
        """The number of the next part, and the events of it that the client has."""
        stream.add_reader(self)

    async def read(self) -> AsyncGenerator[bytes, None]:
        """The rest of the answer, as it comes."""
        stream = self.stream
        while True:
            while self.part < stream.end:
                body, self.part = stream.content(self.part, self._skipped)
                self._skipped = 0
                stream.streams.on_room()
                if body:
                    yield body
            if stream.is_over:
                return
            await stream.changed()

    def close(self) -> None:
        """The connection has ended, or the answer is complete."""
        self.stream.remove_reader(self)


class KeptStream:
    """One request's answer. Lives in one event loop."""

    def __init__(self, streams: "Streams", owner: str, stream_id: str, ttl_s: float) -> None:
        self.streams = streams
        self.owner = owner
        """The identity of the caller: nobody else may read it."""
        self.id = stream_id
        self.ttl_s = ttl_s
        self.status = 0
        """0 until the answer has begun."""
        self.headers: Headers = []
        self.is_events = False
        """Whether the answer consists of server-sent events."""
        self.num_events = 0
        self.num_bytes = 0
        """Kept now, with overhead."""
        self.is_over = False
        self.begun = asyncio.Event()
        """Set once the request was read, or its answer has begun."""
        self.cancelled = asyncio.Event()
        self.readers: set[StreamReader] = set()
        self._parts: deque[tuple[int, bytes]] = deque()
        """(number of the first event, content)."""
        self._num_dropped = 0
        """Parts that are not kept any more."""
        self._news = asyncio.Event()

    # Writing

    def begin(self, status: int, headers: Headers) -> None:
        """The answer begins."""
        self.status, self.headers = status, headers
        media = next((value for name, value in headers if name == b"content-type"), b"")
        self.is_events = media.startswith(b"text/event-stream")
        self.begun.set()
        self._notify()

    def add(self, body: bytes) -> None:
        """More of the answer: whole events, or a part of an answer that has none, which counts as one event."""
        self._parts.append((self.num_events, body))
        self.num_events += body.count(EVENT_END) if self.is_events else 1
        self.num_bytes += size_of(body)
        self._notify()

    def finish(self) -> None:
        """Nothing more is added."""
        self.is_over = True
        self.begun.set()
        self._notify()
        self.streams.on_room()

    def cancel(self) -> None:
        """End the request: nobody waits for it."""
        self.cancelled.set()
        self._notify()

    def trim(self) -> int:
        """Drop what every connected reader has; nothing where there is none, since one may come. Returns the bytes."""
        if not self.readers:
            return 0
        before, least = self.num_bytes, min(reader.part for reader in self.readers)
        while self._parts and self._num_dropped < least:
            _, body = self._parts.popleft()
            self.num_bytes -= size_of(body)
            self._num_dropped += 1
        return before - self.num_bytes

    # Reading

    @property
    def end(self) -> int:
        """The number of the next part."""
        return self._num_dropped + len(self._parts)

    def find(self, event: int) -> tuple[int, int]:
        """(part, events to skip in it) of the event. Raises Trimmed or OutOfRange."""
        if event > self.num_events:
            raise OutOfRange
        first = self._parts[0][0] if self._parts else self.num_events
        if event < first:
            raise Trimmed(first)
        for index in range(len(self._parts) - 1, -1, -1):
            start = self._parts[index][0]
            if start <= event:
                is_behind = index + 1 == len(self._parts) and event == self.num_events
                return (self.end, 0) if is_behind else (self._num_dropped + index, event - start)
        return self.end, 0

    def content(self, part: int, num_skipped: int) -> tuple[bytes, int]:
        """Several parts from `part` on without the first events, and the number of the next part."""
        bodies: list[bytes] = []
        size = 0
        while part < self.end and (not bodies or size < READ_BYTES):
            body = self._parts[part - self._num_dropped][1]
            if num_skipped:
                body = _without(body, num_skipped) if self.is_events else b""
                num_skipped = 0
            bodies.append(body)
            size += len(body)
            part += 1
        return b"".join(bodies), part

    def add_reader(self, reader: StreamReader) -> None:
        self.readers.add(reader)
        if len(self.readers) == 1:
            self.streams.stop_timer(self)

    def remove_reader(self, reader: StreamReader) -> None:
        self.readers.discard(reader)
        self.streams.on_room()
        if not self.readers:
            self.streams.start_timer(self)

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._news.wait()

    async def started(self) -> None:
        """Wait until the answer has begun, or has ended without one."""
        while not self.status and not self.is_over:
            await self.changed()

    def _notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def size_of(body: bytes) -> int:
    """What keeping a part costs."""
    return len(body) + PART_OVERHEAD


def _without(body: bytes, num_events: int) -> bytes:
    """`body` after its first events."""
    start = 0
    for _ in range(num_events):
        start = body.index(EVENT_END, start) + len(EVENT_END)
    return body[start:]


MAX_TTL_S = 60


@dataclass(frozen=True)
class StreamLimits:
    """Bounds of the buffers."""

    num_total: int = 1024
    num_per_caller: int = 32
    bytes_total: int = 128 * 1024 * 1024
    bytes_per_caller: int = 32 * 1024 * 1024


class Streams:
    """Every stream by the identity of its caller and its id, the oldest first."""

    def __init__(self, limits: StreamLimits | None = None) -> None:
        self._limits = limits or StreamLimits()
        self._streams: dict[tuple[str, str], KeptStream] = {}
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._freed = asyncio.Event()
        self._num_waiting = 0
        """Requests that wait for room."""
        self._num_of: Counter[str] = Counter()
        """Streams by caller."""
        self._bytes_of: Counter[str] = Counter()
        self.num_bytes = 0
        """Buffered in all streams."""

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, owner: str, stream_id: str, ttl_s: float) -> KeptStream:
        """A new stream. Raises StreamExists, or TooManyStreams where complete ones that nobody reads make no room."""
        limits, key = self._limits, (owner, stream_id)
        same = self._streams.get(key)
        if same is not None and not _is_idle(same):
            raise StreamExists(stream_id)
        if same is not None:
            self._drop(same)
        if self._num_of[owner] >= limits.num_per_caller and not self._evict(owner):
            raise TooManyStreams(f"{limits.num_per_caller} of one caller")
        if len(self._streams) >= limits.num_total and not self._evict(None):
            raise TooManyStreams(f"{limits.num_total} in all")
        stream = self._streams[key] = KeptStream(self, owner, stream_id, ttl_s)
        self._num_of[owner] += 1
        return stream

    def find(self, owner: str, stream_id: str) -> KeptStream:
        """Raises StreamNotFound, for the streams of others too."""
        stream = self._streams.get((owner, stream_id))
        if stream is None:
            raise StreamNotFound(stream_id)
        return stream

    def cancel(self, stream: KeptStream) -> None:
        """End the request, and forget its answer."""
        stream.cancel()
        self._drop(stream)

    async def add(self, stream: KeptStream, body: bytes) -> None:
        """Add to a stream once there is room. What still waits when it is finished or cancelled is dropped."""
        num_bytes = size_of(body)
        while not (stream.is_over or stream.cancelled.is_set()):
            if self._has_room(stream, num_bytes):
                self._count(stream, num_bytes)
                stream.add(body)
                return
            self._num_waiting += 1
            try:
                await self._freed.wait()
            finally:
                self._num_waiting -= 1

    def _has_room(self, stream: KeptStream, num_bytes: int) -> bool:
        """Whether a part fits, after dropping what may be dropped. A stream may always hold one part."""
        limits = self._limits
        while (is_own := self._bytes_of[stream.owner] + num_bytes > limits.bytes_per_caller) or (
            self.num_bytes + num_bytes > limits.bytes_total
        ):
            if self._evict(stream.owner if is_own else None):
                continue
            num_freed = stream.trim()
            self._count(stream, -num_freed)
            if not num_freed:
                return stream.num_bytes == 0
        return True

    def _count(self, stream: KeptStream, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[stream.owner] += num_bytes

    def _evict(self, owner: str | None) -> bool:
        """Drop the oldest complete stream that nobody reads, of `owner` or of anyone; False where there is none."""
        for stream in self._streams.values():
            if _is_idle(stream) and owner in (None, stream.owner):
                self._drop(stream)
                return True
        return False

    def _drop(self, stream: KeptStream) -> None:
        key, owner = (stream.owner, stream.id), stream.owner
        if self._streams.get(key) is not stream:
            return
        del self._streams[key]
        self.stop_timer(stream)
        self._count(stream, -stream.num_bytes)
        self._num_of[owner] -= 1
        if not self._num_of[owner]:
            del self._num_of[owner], self._bytes_of[owner]
        self.on_room()

    def start_timer(self, stream: KeptStream) -> None:
        """The last reader has left."""
        key = stream.owner, stream.id
        if self._streams.get(key) is stream:
            self._timers[key] = asyncio.get_running_loop().call_later(stream.ttl_s, self.cancel, stream)

    def stop_timer(self, stream: KeptStream) -> None:
        """A reader has come."""
        if (timer := self._timers.pop((stream.owner, stream.id), None)) is not None:
            timer.cancel()

    def on_room(self) -> None:
        """A reader has taken something, or a stream is complete or gone: there may be room."""
        if self._num_waiting:
            freed, self._freed = self._freed, asyncio.Event()
            freed.set()


def _is_idle(stream: KeptStream) -> bool:
    return stream.is_over and not stream.readers
