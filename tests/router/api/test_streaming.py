"""A stream as ASGI messages: their order, keep-alive comments, and cleanup however it ends."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lorikeet.router.api.streaming import ClientGone, EventStream, TextEvents, event

pytestmark = pytest.mark.anyio


class Connection:
    """The two sides of ASGI for one request."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]


def test_an_event_is_one_line_of_json() -> None:
    assert event({"a": "b\nc", "d": None}) == b'data: {"a":"b\\nc","d":null}\n\n'


async def test_each_part_is_one_message() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    closed: list[bool] = []
    connection = Connection()
    stream = EventStream(events(), {"x-a": "b"}, on_close=lambda: closed.append(True))
    await stream({}, connection.receive, connection.send)
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream") and headers[b"x-a"] == b"b"
    assert b"content-length" not in headers
    assert connection.bodies == [b"one", b"two", b""]
    assert [message["more_body"] for message in connection.sent[1:]] == [True, True, False]
    assert closed == [True]


async def test_keep_alive_comments() -> None:
    connection = Connection()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        while connection.bodies.count(b":\n\n") < 2:  # noqa: ASYNC110 - time itself is what is waited for
            await asyncio.sleep(0.005)
        yield b"two"

    await EventStream(events(), {}, keep_alive_s=0.02)({}, connection.receive, connection.send)
    assert connection.bodies[0] == b"one"
    assert connection.bodies[-2:] == [b"two", b""]
    assert set(connection.bodies[1:-2]) == {b":\n\n"}
    num_sent = len(connection.sent)
    await asyncio.sleep(0.05)
    assert len(connection.sent) == num_sent, "no comment after the end"


async def test_no_comment_is_sent_while_tokens_are_written() -> None:
    connection, writer = Connection(), TextEvents()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        writer.written_at = asyncio.get_running_loop().time() + 3600.0
        await asyncio.sleep(0.2)

    await EventStream(events(), {}, keep_alive_s=0.02, writer=writer)({}, connection.receive, connection.send)
    assert connection.bodies == [b"one", b""]


async def test_a_disconnect_closes_the_generator() -> None:
    ended: list[str] = []
    connection = Connection()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            connection.gone.set()
            await asyncio.sleep(60)
        finally:
            ended.append("generator")

    stream = EventStream(events(), {}, on_close=lambda: ended.append("stream"))
    with pytest.raises(ClientGone):
        await stream({}, connection.receive, connection.send)
    assert ended == ["generator", "stream"]
    await asyncio.sleep(0)  # the task itself is not cancelled


async def test_other_cancellations_are_raised() -> None:
    connection = Connection()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await asyncio.sleep(60)

    task = asyncio.create_task(EventStream(events(), {})({}, connection.receive, connection.send))
    while not connection.bodies:  # noqa: ASYNC110 - a test's own list has no event
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
