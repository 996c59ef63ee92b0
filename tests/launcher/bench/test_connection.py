"""Connections of the load generator, against small servers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lorikeet.launcher.bench.load import ConnectionPool

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


def answers_of(serve: Server, count: int) -> list[bytes | Exception]:
    """The bodies of so many requests, one after the other, or what they raised."""

    async def ask() -> list[bytes | Exception]:
        async with await asyncio.start_server(serve, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            connections = ConnectionPool(f"http://127.0.0.1:{port}", {}, timeout_s=10)
            answers: list[bytes | Exception] = []
            for _ in range(count):
                try:
                    answers.append((await connections.post("/", b"{}")).body)
                except OSError as error:
                    answers.append(error)
            await connections.close()
            return answers

    return asyncio.run(ask())


def test_a_request_is_sent_again_if_the_server_had_closed_the_connection() -> None:
    """llama.cpp closes it after an answer that is a stream, and does not say so."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await read_request(reader))
        writer.write(ANSWER)
        writer.close()

    assert answers_of(serve, 3) == [b"ok"] * 3
    assert len(requests) == 3


@pytest.mark.parametrize("part", [b"", ANSWER[:-1]])
def test_a_connection_that_is_closed_during_the_first_answer_is_an_error(part: bytes) -> None:
    """And so is one that is closed after a part of an answer: the server has begun to work on the request."""
    num_requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        await read_request(reader)
        num_requests += 1
        if part:
            writer.write(ANSWER)
            await read_request(reader)
            num_requests += 1
            writer.write(part)
        writer.close()

    *earlier, last = answers_of(serve, 2 if part else 1)
    assert earlier == ([b"ok"] if part else [])
    assert isinstance(last, ConnectionError) and "closed the connection" in str(last)
    assert num_requests == len(earlier) + 1
