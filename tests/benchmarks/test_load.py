"""The load generator against a small server on a real socket that speaks events as servers do."""

import asyncio
import json

from benchmarks.load.completions import (
    Endpoint,
    RequestLength,
    TimedCompletion,
    closed_loop,
    complete,
    tokens_per_second,
)

LENGTH = RequestLength(3, 4)


def events(count: int, result: int) -> list[bytes]:
    parts = [json.dumps({"choices": [{"text": f"t{i}"}]}).encode() for i in range(count)]
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": result}}).encode()
    return [b"data: " + part + b"\n\n" for part in (*parts, usage, b"[DONE]")]


async def serve(status: bytes, pieces: list[bytes]) -> tuple[asyncio.Server, Endpoint, list[bytes]]:
    """A server that answers every request with `pieces`, one chunk each; the bodies it was sent."""
    bodies: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        bodies.append(await reader.readexactly(size))
        writer.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    return server, Endpoint(port, "a model", {"ignore_eos": True}), bodies


def ask(status: bytes, pieces: list[bytes]) -> tuple[TimedCompletion, list[bytes]]:
    async def run() -> tuple[TimedCompletion, list[bytes]]:
        server, target, bodies = await serve(status, pieces)
        async with server:
            return await complete(target, "a b c", LENGTH), bodies

    return asyncio.run(run())


def test_one_time_per_token_and_the_usage() -> None:
    answer, bodies = ask(b"200 OK", events(4, 4))
    assert answer.error == ""
    assert (answer.num_prompt, answer.num_output, len(answer.events)) == (3, 4, 4)
    assert answer.sent <= answer.events[0] <= answer.last
    assert json.loads(bodies[0])["ignore_eos"] is True


def test_events_that_share_a_chunk_or_are_torn_apart_are_counted_alike() -> None:
    whole = b"".join(events(4, 4))
    for pieces in ([whole], [whole[:37], whole[37:90], whole[90:]]):
        answer, _ = ask(b"200 OK", pieces)
        assert (answer.error, len(answer.events)) == ("", 4)


def test_too_few_tokens_are_an_error() -> None:
    assert ask(b"200 OK", events(3, 3))[0].error == "3 tokens in, 3 out"


def test_a_refusal_and_a_stream_without_usage_are_errors() -> None:
    assert "status 429" in ask(b"429 Too Many Requests", [b"no"])[0].error
    assert ask(b"200 OK", events(4, 4)[:-2])[0].error
    assert ask(b"200 OK", [])[0].error


def test_a_closed_loop_asks_every_prompt_once() -> None:
    async def run() -> None:
        server, target, bodies = await serve(b"200 OK", events(4, 4))
        async with server:
            closed = await closed_loop(target, [f"p{i}" for i in range(10)], 3, LENGTH)
        assert not any(answer.error for answer in closed)
        assert tokens_per_second(closed) > 0
        asked = sorted(json.loads(body)["prompt"] for body in bodies)
        assert asked == sorted(f"p{i}" for i in range(10))

    asyncio.run(run())
