"""The connection that carries a shard's outputs on one host, and which messages are delivered together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.outputs import MAX_MESSAGE_BYTES, TOKEN_BYTES, framed, socket_path
from lorikeet.router.shards import outputs
from lorikeet.router.shards.outputs import Arrivals, OutputConnection

pytestmark = pytest.mark.anyio

MESSAGES = [
    pb.StepOutput(),
    *(
        pb.StepOutput(step=step, outputs=[pb.RequestOutput(id=step, token_ids=range(size))])
        for step, size in enumerate((0, 1, 50, 200_000, 3))
    ),
]


class Delivered:
    """What was delivered, in one list per call."""

    def __init__(self) -> None:
        self.calls: list[list[pb.StepOutput]] = []

    def __call__(self, messages: Sequence[pb.StepOutput]) -> None:
        self.calls.append(list(messages))

    @property
    def messages(self) -> list[pb.StepOutput]:
        return [message for call in self.calls for message in call]


class Peer:
    """The shard's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[Delivered, OutputConnection, Peer]]:
    address, delivered = f"unix:{folder}/shard.sock", Delivered()
    peers: asyncio.Queue[Peer] = asyncio.Queue()
    server = await asyncio.start_unix_server(
        lambda reader, writer: peers.put_nowait(Peer(reader, writer)), socket_path(address)
    )
    connection = await OutputConnection.open(address, Arrivals(delivered))
    peer = await peers.get()
    token = await peer.reader.readexactly(TOKEN_BYTES)
    assert connection.metadata[1].encode() == token
    try:
        async with asyncio.timeout(30):
            yield delivered, connection, peer
    finally:
        connection.close()
        peer.writer.close()
        server.close()


@pytest.mark.parametrize("size", [1, 5, 1000, 1 << 20])
async def test_messages_arrive_however_they_are_divided(tmp_path: Path, size: int) -> None:
    messages = MESSAGES if size > 100 else [each for each in MESSAGES if each.ByteSize() < 1000]
    data = b"".join(framed(message.SerializeToString()) for message in messages)
    async with connected(tmp_path) as (delivered, connection, peer):
        for first in range(0, len(data), size):
            await peer.send(data[first : first + size])
            if size < 100:
                await asyncio.sleep(0)
        peer.writer.close()
        assert await connection.ended == ""
        assert delivered.messages == messages


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), f"announced a message of {MAX_MESSAGE_BYTES + 1} bytes"),
        (framed(b"\xff\xff\xff"), "no StepOutput"),
        (framed(bytes(10))[:-1], "ended within a message"),
        (b"\1", "ended within a message"),
    ],
)
async def test_what_is_no_message_ends_it(tmp_path: Path, data: bytes, reason: str) -> None:
    async with connected(tmp_path) as (delivered, connection, peer):
        await peer.send(framed(MESSAGES[2].SerializeToString()) + data)
        if "within" in reason:
            peer.writer.close()
        assert reason in await connection.ended
        assert delivered.messages == [MESSAGES[2]], "what came before is delivered"
        assert await peer.reader.read() == b"", "the router closes it"


async def test_a_socket_that_nobody_listens_at_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await OutputConnection.open(f"unix:{tmp_path}/shard.sock", Arrivals(Delivered()))


def running(number: int, num_running: int = outputs.JOIN_REQUESTS) -> list[pb.StepOutput]:
    return [pb.StepOutput(step=number, load=pb.Load(num_running=num_running))]


async def test_a_process_that_keeps_up_delivers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered = Delivered()
    arrivals = Arrivals(delivered)
    monkeypatch.setattr(outputs, "JOIN_LOAD", 1e9)
    arrivals.add(running(1))
    monkeypatch.setattr(outputs, "JOIN_LOAD", -1.0)
    arrivals.add(running(2, outputs.JOIN_REQUESTS - 1))
    assert [len(call) for call in delivered.calls] == [1, 1]


async def test_one_that_cannot_keep_up_waits_for_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "JOIN_LOAD", -1.0)
    monkeypatch.setattr(outputs, "JOIN_SECONDS", 0.05)
    delivered = Delivered()
    arrivals = Arrivals(delivered)
    for number in range(outputs.MAX_JOINED + 2):
        arrivals.add(running(number))
    assert [len(call) for call in delivered.calls] == [outputs.MAX_JOINED]
    await asyncio.sleep(0.2)
    assert [len(call) for call in delivered.calls] == [outputs.MAX_JOINED, 2]
    arrivals.add(running(20))
    arrivals.flush()
    await asyncio.sleep(0.2)
    assert [len(call) for call in delivered.calls] == [outputs.MAX_JOINED, 2, 1]
    assert [message.step for message in delivered.messages] == [*range(outputs.MAX_JOINED + 2), 20]
