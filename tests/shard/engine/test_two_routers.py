"""Two routers with the secret share a shard by their callers: neither keeps the other's requests waiting."""

import asyncio
import time

import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.shard.engine.intake import COUNTED_STEPS, PAUSE_S, Intake
from lorikeet.shard.grpc.codec import Bounds, read_submit
from lorikeet.shard.grpc.server import ShardService
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, Refusal, StreamOpened
from lorikeet.shard.requests.request import FinishReason, Request
from tests.shard.grpc.test_server import NEUTRAL
from tests.shard.rig import EPOCH, Rig, Setup, make_request

OTHER = 2
"""The stream of the other router."""


def flooded(setup: Setup, callers: int = 1) -> Rig:
    """A shard to which another router has sent ten thousand requests."""
    rig = Rig(setup)
    rig.outbox.open(OTHER, wake=lambda: None)
    rig.inbox.put(StreamOpened(OTHER))
    submits: list[Request | Refusal] = [
        Request((OTHER, number), [1 + number % 50] * 8, 8, 100, caller=f"flood {number % callers}")
        for number in range(10_000)
    ]
    rig.inbox.put(Commands(OTHER, submits=submits))
    rig.step(3)
    return rig


@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_starts_at_once_next_to_ten_thousand_of_another_router(lag: int) -> None:
    rig = flooded(Setup(max_running=8, max_waiting=8, commit_lag=lag))
    assert len(rig.scheduler.running) == 8
    for number in range(1, 5):
        rig.submit(make_request(number, [3, 4, 5], 3, caller="canary"))
        rig.step(4 + lag)
        assert rig.outputs[number].finish_reason is FinishReason.LENGTH
        assert len(rig.outputs[number].token_ids) == 3


def test_a_router_gets_the_credit_of_its_callers_although_the_shard_is_full() -> None:
    rig = flooded(Setup(max_running=8, max_waiting=8, num_pages=200))
    status = rig.step().status
    assert status.credit_requests == 4  # half of 8 that run and 1 that replaces one
    assert status.credit_tokens == 400
    for number in (1, 2):
        rig.submit(make_request(number, [3, 4, 5], 50, caller="canary"))
    status = rig.step().status
    assert status.credit_requests == 2
    assert len([request for request in rig.scheduler.running if request.key[0] == EPOCH]) == 2
    assert rig.outbox.take(OTHER).status.credit_requests == 0


def test_steps_that_only_decode_do_not_count_the_requests_of_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = flooded(Setup(max_running=8, max_waiting=8, num_pages=200))
    rig.step(3)
    tokens, num_counted, count = [rig.step().status.credit_tokens], 0, Intake._count_credits

    def counted(intake: Intake, num_requests: int, num_tokens: int) -> dict[int, tuple[int, int]]:
        nonlocal num_counted
        num_counted += 1
        return count(intake, num_requests, num_tokens)

    monkeypatch.setattr(Intake, "_count_credits", counted)
    tokens += [rig.step().status.credit_tokens for _ in range(2 * COUNTED_STEPS)]
    assert num_counted == 2 and set(tokens) == {400}
    rig.submit(make_request(1, [3, 4, 5], 50, caller="canary"))
    assert rig.step().status.credit_requests == 3 and num_counted == 3


def test_a_shard_with_room_gives_all_of_it_to_each_router() -> None:
    rig = Rig(Setup(max_running=8, max_waiting=8))
    rig.outbox.open(OTHER, wake=lambda: None)
    rig.inbox.put(StreamOpened(OTHER))
    rig.submit(make_request(1, [3, 4, 5], 50, caller="one"))
    assert rig.step().status.credit_requests == rig.outbox.take(OTHER).status.credit_requests == 8


def test_a_router_that_names_no_caller_is_one() -> None:
    submit = pb.Submit(id=1, prompt_ids=[1], max_new_tokens=1, sampling=NEUTRAL)
    bounds = Bounds(vocab_size=10, max_total_tokens=10, num_kv_tokens=10)
    requests = [read_submit(epoch, submit, bounds) for epoch in (EPOCH, OTHER)]
    assert [(request.caller, request.share) for request in requests if isinstance(request, Request)] == [
        (f"stream {EPOCH}", 1.0),
        (f"stream {OTHER}", 1.0),
    ]


@pytest.mark.parametrize("share", [-1.0, 1e-9, 1e9, float("inf"), float("nan")])
def test_a_share_has_a_range(share: float) -> None:
    submit = pb.Submit(id=1, prompt_ids=[1], max_new_tokens=1, sampling=NEUTRAL, share=share)
    read = read_submit(EPOCH, submit, Bounds(vocab_size=10, max_total_tokens=10, num_kv_tokens=10))
    assert isinstance(read, Refusal) and "share must be from" in read.reason


def test_a_router_that_sends_more_than_its_credit_is_read_later() -> None:
    rig = flooded(Setup(max_running=8, max_waiting=8))
    assert 4 < rig.inbox.pause_of(OTHER) <= PAUSE_S
    rig.submit(*(make_request(number, [3, 4, 5], 3, caller="canary") for number in range(1, 17)))
    rig.step()
    assert rig.inbox.pause_of(EPOCH) <= 0


@pytest.mark.anyio
async def test_a_stream_is_read_on_once_the_step_loop_has_taken_its_requests() -> None:
    inbox = Inbox()
    service = ShardService(inbox, Outbox())
    inbox.put(StreamOpened(OTHER))
    taken = asyncio.create_task(service._taken(OTHER))
    await asyncio.sleep(0.02)
    assert not taken.done()
    inbox.pause(OTHER, 0.05)
    began = time.monotonic()
    inbox.drain()
    await taken
    assert time.monotonic() - began >= 0.04
    await service._taken(EPOCH)
