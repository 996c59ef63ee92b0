"""All resumable streams of one router, within bounds of number and bytes, in total and per caller.

Where there is no room, complete answers that nobody reads are dropped first, the oldest first. A running stream then
drops what its connected readers have, and waits where that is not enough: its request goes on, and nothing is lost.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from lorikeet.router.errors import StreamExists, StreamNotFound, TooManyStreams
from lorikeet.router.streams.stream import KeptStream, size_of

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
        stream = self._streams[key] = KeptStream(owner, stream_id, ttl_s)
        self._num_of[owner] += 1
        stream.on_read = lambda: self._stop_timer(stream)
        stream.on_unread = lambda: self._start_timer(stream)
        stream.on_change = self._notify
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
        """Add to a stream once there is room. What comes after its end was asked for is dropped."""
        num_bytes = size_of(body)
        while not stream.cancelled.is_set():
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
        self._stop_timer(stream)
        self._count(stream, -stream.num_bytes)
        self._num_of[owner] -= 1
        if not self._num_of[owner]:
            del self._num_of[owner], self._bytes_of[owner]
        self._notify()

    def _start_timer(self, stream: KeptStream) -> None:
        key = stream.owner, stream.id
        if self._streams.get(key) is stream:
            self._timers[key] = asyncio.get_running_loop().call_later(stream.ttl_s, self.cancel, stream)

    def _stop_timer(self, stream: KeptStream) -> None:
        if (timer := self._timers.pop((stream.owner, stream.id), None)) is not None:
            timer.cancel()

    def _notify(self) -> None:
        """A reader has taken something, or a stream is complete or gone: there may be room."""
        if self._num_waiting:
            freed, self._freed = self._freed, asyncio.Event()
            freed.set()


def _is_idle(stream: KeptStream) -> bool:
    return stream.is_over and not stream.readers
