"""A fixed sample of the hostile requests of `benchmarks.leak` against a real server, and its own judgement."""

import asyncio
import random
from collections import Counter

import pytest

from benchmarks import leak, servers
from benchmarks.abuse import BAD, GOOD, Attempt, attempt

SAMPLE = 90


@pytest.mark.long
def test_a_real_server_survives_and_holds_nothing() -> None:
    with servers.running("leak-test", servers.lorikeet(leak.MODEL, "--cpu-memory", str(1 << 28))) as server:
        case = leak.batch(server, 0, SAMPLE)
    assert case.raw["wrong"] == []
    assert (case.error, case.raw["alive"]) == ("", True)
    assert (case.raw["pages_held"], case.raw["requests_inside"]) == (0, 0)
    assert case.raw["pages"] > 0


def test_a_batch_holds_every_kind() -> None:
    draw = random.Random(leak.SEED)
    kinds = Counter(attempt(draw, leaves=index % 3 == 0).kind for index in range(2000))
    assert len(kinds) == 2 * len(GOOD) + len(BAD)
    cancelled = sum(count for kind, count in kinds.items() if kind.startswith("cancelled"))
    assert cancelled == 667


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", ""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", ""),
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nok", "500"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno", "no"),
        (b"", "Error"),
    ],
)
def test_an_answer_is_judged_by_status_and_body(answer: bytes, told: str) -> None:
    async def run() -> str:
        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            tried = Attempt("plain", b"POST / \r\n", lambda status, body: (status, body) == (200, b"ok"))
            return await leak.send(port, tried)

    got = asyncio.run(run())
    assert told in got
    assert bool(got) == bool(told)
