"""The router's load generator notices what a stream lacks, and the pretended shard merges as the real one does."""

import asyncio
from typing import cast

import pytest

from benchmarks.serving.token_times import StreamClient
from lorikeet.proto import shard_pb2 as pb
from tests.router.simulated_shard import merge_outputs


class Transport:
    """Remembers what was written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def stream(num_events: int) -> bytes:
    event = b'data: {"token":{"text":"error","logprob":-1}}\n\n'
    events = event * num_events
    return b"HTTP/1.1 200 OK\r\n\r\n" + events + b"0\r\n\r\n"


def fed(client: StreamClient, data: bytes, size: int) -> Transport:
    transport = Transport()
    client.connection_made(cast(asyncio.Transport, transport))
    for start in range(0, len(data), size):
        client.data_received(data[start : start + size])
    return transport


@pytest.mark.parametrize("size", [1, 3, 7, 100_000])
def test_events_are_counted_wherever_reads_end(size: int) -> None:
    client = StreamClient(5)
    transport = fed(client, stream(5), size)
    assert (client.num_events, client.num_requests, client.failure) == (5, 1, "")
    assert len(transport.written) == 2  # it asks again


def test_missing_events_and_errors_are_failures() -> None:
    short = StreamClient(5)
    fed(short, stream(4), 1000)
    assert "4 events instead of 5" in short.failure
    broken = StreamClient(1)
    fed(broken, b'data: {"error":"x"}\n\n0\r\n\r\n', 1000)
    assert broken.failure


def test_coalesced_steps_lose_nothing() -> None:
    def part(wire_id: int, token_id: int, finish: pb.FinishReason = pb.FINISH_NONE) -> pb.RequestOutput:
        return pb.RequestOutput(
            id=wire_id, token_ids=[token_id], sources=b"\1", step_ends=b"\1", logprobs=[-0.5], finish_reason=finish
        )

    earlier = pb.StepOutput(outputs=[part(1, 10), part(2, 20)])
    merged = {each.id: each for each in merge_outputs(earlier, [part(1, 11, pb.FINISH_LENGTH), part(3, 30)])}
    assert list(merged[1].token_ids) == [10, 11]
    assert (merged[1].sources, merged[1].step_ends) == (b"\1\1", b"\1\1")
    assert len(merged[1].logprobs) == 2
    assert merged[1].finish_reason == pb.FINISH_LENGTH
    assert list(merged[2].token_ids) == [20]
    assert list(merged[3].token_ids) == [30]
