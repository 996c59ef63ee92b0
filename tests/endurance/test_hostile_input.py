"""Hostile requests and hostile adapters against real servers: right answers, and nothing left behind."""

import asyncio
import random
from collections import Counter

import pytest

from benchmarks.load import servers
from tests.adapters.hostile import CASES
from tests.endurance import hostile_adapters, leaks
from tests.endurance.hostile_requests import BAD, GOOD, Attempt, attempt

QUICK = 90


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(QUICK,), (leaks.BATCH,) * leaks.BATCHES], ids=["quick", "full"])
def test_hostile_requests_get_right_answers_and_hold_nothing(sizes: tuple[int, ...]) -> None:
    with servers.running("leak-test", servers.lorikeet(leaks.MODEL, "--cpu-memory", str(1 << 28))) as server:
        cases = [leaks.batch(server, number, size) for number, size in enumerate(sizes)]
    for case in cases:
        assert (case.error, case.raw["wrong"], case.raw["alive"]) == ("", [], True)
        assert (case.raw["pages_held"], case.raw["requests_inside"]) == (0, 0)
        assert case.raw["pages"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("batches", "fuzzed"), [(1, 4), (hostile_adapters.BATCHES, hostile_adapters.FUZZED)], ids=["quick", "full"]
)
def test_hostile_adapters_are_rejected_and_leave_nothing(batches: int, fuzzed: int) -> None:
    cases = list(hostile_adapters.measure(batches, fuzzed))
    for case in cases:
        assert (case.error, case.raw["wrong"], case.raw["marks"]) == ("", [], [])
        assert (case.raw["pages_held"], case.raw["requests_inside"]) == (0, 0)
        assert case.raw["slots_held"] <= 0
        assert case.raw["texts_meanwhile"] > 0
    if len(cases) == hostile_adapters.BATCHES:
        assert sum(case.raw["memory_grown_mb"] for case in cases) <= hostile_adapters.MEMORY_MB


def test_batches_send_every_broken_adapter() -> None:
    assert len(CASES) >= 40
    batches = hostile_adapters.BATCHES
    places = [place for number in range(batches) for place in range(len(CASES))[number::batches]]
    assert sorted(places) == list(range(len(CASES)))


def test_a_batch_has_every_kind_of_request() -> None:
    draw = random.Random(leaks.SEED)
    kinds = Counter(attempt(draw, leaves=index % 3 == 0).kind for index in range(2000))
    assert len(kinds) == 2 * len(GOOD) + len(BAD)
    cancelled = sum(count for kind, count in kinds.items() if kind.startswith("cancelled"))
    assert cancelled == 667


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", ""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", ""),
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nok", "500"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno", "no"),
        (b"", "Error"),
    ],
)
def test_an_answer_is_validated_by_status_and_body(answer: bytes, fault: str) -> None:
    async def run() -> str:
        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            tried = Attempt("plain", b"POST / \r\n", lambda status, body: (status, body) == (200, b"ok"))
            return await leaks.send(port, tried)

    found = asyncio.run(run())
    assert fault in found
    assert bool(found) == bool(fault)
