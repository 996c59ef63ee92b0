"""The buffered answer of one resumable request, which any number of connections read.

Parts are kept as they were sent. A position in the answer is a number of events, because clients count events.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

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


class Reader:
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
                stream.on_change()
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

    def __init__(self, owner: str, stream_id: str, ttl_s: float) -> None:
        self.owner = owner
        """The identity of the caller, who alone may read it."""
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
        self.readers: set[Reader] = set()
        self.on_unread: Callable[[], None] = lambda: None
        """Called when the last reader leaves."""
        self.on_read: Callable[[], None] = lambda: None
        """Called when the first reader comes."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a reader has taken something, or the answer is complete."""
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
        self.on_change()

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

    def add_reader(self, reader: Reader) -> None:
        self.readers.add(reader)
        if len(self.readers) == 1:
            self.on_read()

    def remove_reader(self, reader: Reader) -> None:
        self.readers.discard(reader)
        self.on_change()
        if not self.readers:
            self.on_unread()

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
