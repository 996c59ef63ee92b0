"""The buffers of resumable streams: what readers get from any event on, and the bounds, on random histories."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorikeet.router.errors import StreamExists, StreamNotFound, TooManyStreams
from lorikeet.router.kept_streams import (
    PART_OVERHEAD,
    KeptStream,
    OutOfRange,
    StreamLimits,
    StreamReader,
    Streams,
    Trimmed,
    size_of,
)

pytestmark = pytest.mark.anyio

EVENTS = [(b"content-type", b"text/event-stream")]
LIMITS = StreamLimits(num_total=4, num_per_caller=2, bytes_total=1000, bytes_per_caller=600)


def event(number: int) -> bytes:
    return b"data: %d\n\n" % number


def begun(streams: Streams, owner: str, stream_id: str) -> KeptStream:
    stream = streams.begin(owner, stream_id, 30)
    stream.begin(200, EVENTS)
    return stream


async def rest(stream: KeptStream, first: int = 0) -> bytes:
    reader = StreamReader(stream, first)
    try:
        return b"".join([part async for part in reader.read()])
    finally:
        reader.close()


@given(parts=st.lists(st.integers(1, 5), max_size=12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_reader_gets_every_event_from_any_one_on(parts: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, sum(parts)))
    num_before = data.draw(st.integers(0, len(parts)))

    async def run() -> None:
        stream = KeptStream(Streams(), "me", "one", 30)
        stream.begin(200, EVENTS)
        numbers = iter(range(sum(parts)))
        bodies = [b"".join(event(next(numbers)) for _ in range(size)) for size in parts]
        for body in bodies[:num_before]:
            stream.add(body)
        if first > stream.num_events:
            with pytest.raises(OutOfRange):
                StreamReader(stream, first)
            return
        reading = asyncio.ensure_future(rest(stream, first))
        for body in bodies[num_before:]:
            await asyncio.sleep(0)
            stream.add(body)
        stream.finish()
        assert await reading == b"".join(map(event, range(first, sum(parts))))

    asyncio.run(run())


async def test_an_answer_without_events_is_read_from_its_beginning(anyio_backend: str) -> None:
    stream = KeptStream(Streams(), "me", "one", 30)
    stream.begin(200, [(b"content-type", b"application/json")])
    stream.add(b'{"text": "\\n\\n"}')
    stream.finish()
    assert await rest(stream) == b'{"text": "\\n\\n"}'
    assert await rest(stream, 1) == b""


async def test_streams_belong_to_their_caller(anyio_backend: str) -> None:
    streams = Streams(LIMITS)
    mine = begun(streams, "me", "one")
    assert streams.find("me", "one") is mine
    for owner, stream_id in (("you", "one"), ("me", "two")):
        with pytest.raises(StreamNotFound):
            streams.find(owner, stream_id)
    begun(streams, "you", "one")  # ids of different callers are independent
    with pytest.raises(StreamExists):
        begun(streams, "me", "one")
    mine.finish()
    assert begun(streams, "me", "one") is not mine


async def test_numbers_are_bounded_and_complete_streams_make_room(anyio_backend: str) -> None:
    streams = Streams(LIMITS)
    first, second = begun(streams, "me", "a"), begun(streams, "me", "b")
    with pytest.raises(TooManyStreams):
        begun(streams, "me", "c")
    second.finish()
    begun(streams, "me", "c")
    with pytest.raises(StreamNotFound):
        streams.find("me", "b")
    begun(streams, "you", "a")
    begun(streams, "you", "b")
    with pytest.raises(TooManyStreams):
        begun(streams, "they", "a")
    first.finish()
    reader = StreamReader(first, 0)
    with pytest.raises(TooManyStreams):
        begun(streams, "they", "a")
    reader.close()
    begun(streams, "they", "a")
    assert len(streams) == LIMITS.num_total


async def test_a_stream_that_is_not_read_waits_at_the_bound_and_loses_nothing(anyio_backend: str) -> None:
    streams = Streams(LIMITS)
    stream = begun(streams, "me", "a")
    body = b"x" * (200 - PART_OVERHEAD - 2) + b"\n\n"
    for _ in range(3):
        await streams.add(stream, body)
    waiting = asyncio.ensure_future(streams.add(stream, body))
    await asyncio.sleep(0.02)
    assert not waiting.done() and streams.num_bytes == 600
    reading = asyncio.ensure_future(rest(stream))
    await waiting
    stream.finish()
    assert await reading == 4 * body
    with pytest.raises(Trimmed) as trimmed:
        StreamReader(stream, 0)
    assert trimmed.value.first == 3
    assert await rest(stream, 3) == body


async def test_others_make_room_only_with_complete_streams(anyio_backend: str) -> None:
    streams = Streams(LIMITS)
    done, mine = begun(streams, "you", "a"), begun(streams, "me", "a")
    await streams.add(done, b"x" * (500 - PART_OVERHEAD))
    await streams.add(mine, b"x" * (500 - PART_OVERHEAD))
    waiting = asyncio.ensure_future(streams.add(mine, b"y" * 4))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    done.finish()
    await waiting
    with pytest.raises(StreamNotFound):
        streams.find("you", "a")


async def test_cancelling_frees_and_drops_what_comes_later(anyio_backend: str) -> None:
    streams = Streams(LIMITS)
    stream = begun(streams, "me", "a")
    await streams.add(stream, b"x" * (600 - PART_OVERHEAD))
    waiting = asyncio.ensure_future(streams.add(stream, b"y"))
    await asyncio.sleep(0.02)
    streams.cancel(stream)
    await waiting
    assert stream.cancelled.is_set() and streams.num_bytes == 0 and len(streams) == 0


async def test_a_stream_ends_its_time_after_its_last_reader(anyio_backend: str) -> None:
    streams = Streams(LIMITS)
    stream = streams.begin("me", "a", 0.05)
    stream.begin(200, EVENTS)
    reader = StreamReader(stream, 0)
    await asyncio.sleep(0.1)
    assert streams.find("me", "a") is stream, "it is read"
    reader.close()
    again = StreamReader(stream, 0)
    await asyncio.sleep(0.1)
    assert streams.find("me", "a") is stream, "it is read again"
    again.close()
    await asyncio.wait_for(stream.cancelled.wait(), 5)  # noqa: TID251
    with pytest.raises(StreamNotFound):
        streams.find("me", "a")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "add", "finish", "read", "leave", "cancel"]), st.integers(0, 5), st.integers(1, 300)
    ),
    max_size=60,
)


@given(STEPS)
@example([("begin", 2, 1), ("add", 2, 105), ("add", 2, 300), ("finish", 2, 1)])  # ends while a part waits for room
@settings(max_examples=60, deadline=None)
def test_counts_are_exact_and_bounds_hold(steps: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        streams = Streams(LIMITS)
        open_streams: dict[int, KeptStream] = {}
        readers: list[StreamReader] = []
        adding: list[asyncio.Future[None]] = []
        for what, number, size in steps:
            stream = open_streams.get(number)
            if what == "begin":
                try:
                    open_streams[number] = begun(streams, f"caller {number % 3}", str(number))
                except (TooManyStreams, StreamExists):
                    pass
            elif stream is None:
                continue
            elif what == "add" and not stream.is_over:
                adding.append(asyncio.ensure_future(streams.add(stream, b"x" * size + b"\n\n")))
            elif what == "finish":
                stream.finish()
            elif what == "read":
                readers.append(StreamReader(stream, stream.num_events))
            elif what == "leave" and readers:
                readers.pop().close()
            elif what == "cancel":
                streams.cancel(stream)
            await asyncio.sleep(0)
            kept = list(streams._streams.values())
            assert streams.num_bytes == sum(stream.num_bytes for stream in kept) >= 0
            assert len(kept) <= LIMITS.num_total
            for owner in {stream.owner for stream in kept}:
                own = [stream for stream in kept if stream.owner == owner]
                most = max(size_of(b"x" * 302), LIMITS.bytes_per_caller)
                assert len(own) <= LIMITS.num_per_caller
                assert sum(stream.num_bytes for stream in own) <= most + len(own) * size_of(b"x" * 302)
        for kept_stream in list(streams._streams.values()):
            streams.cancel(kept_stream)
        await asyncio.gather(*adding)
        assert streams.num_bytes == 0 and not streams._num_of and not streams._timers

    asyncio.run(run())
