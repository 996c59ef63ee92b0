"""The gRPC server over a real Unix socket, with the step loop in a thread and a fake model that detects mix-ups."""

import asyncio
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet.proto import digest, shard_pb2_grpc
from lorikeet.proto import shard_pb2 as pb
from lorikeet.shard.grpc import streams
from lorikeet.shard.grpc.codec import Bounds
from lorikeet.shard.grpc.server import Facts, Server, divided, wait_for_event
from lorikeet.shard.startup.model_files import ModelFiles
from tests.shard.fake_model import VOCAB_SIZE, generate_alone
from tests.shard.rig import Rig, Setup

TIMEOUT_S = 30.0
NEUTRAL = pb.Sampling(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)


class Shard:
    """A shard in this process."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.rig = Rig(setup)
        self.path = folder / "shard.sock"
        self.server = Server(f"unix:{self.path}", self.rig.inbox, self.rig.outbox)
        (folder / "config.json").write_text("{}")
        self.files = ModelFiles(folder)
        self.address = self.server.start()
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def ready(self) -> None:
        cache = self.rig.scheduler.cache
        bounds = Bounds(VOCAB_SIZE, 600, cache.num_pages * cache.page_size)
        info = pb.ShardInfo(model_id="fake", vocab_size=VOCAB_SIZE)
        self.server.ready(Facts(info, bounds, lambda: self.rig.engine.running_step, self.files.digest))
        self._thread.start()

    def stop(self) -> None:
        self.rig.engine.stop()
        if self._thread.is_alive():
            self._thread.join(TIMEOUT_S)
        self.server.stop()
        assert not self.errors

    def _run(self) -> None:
        try:
            self.rig.engine.run()
        except BaseException as error:
            self.errors.append(error)


@pytest.fixture
def make_shard(tmp_path: Path) -> Iterator[Callable[..., Shard]]:
    shards = []

    def make(**values: int) -> Shard:
        shard = Shard(tmp_path, Setup(**({"num_pages": 1000} | values)))
        shards.append(shard)
        shard.ready()
        return shard

    yield make
    for shard in shards:
        shard.stop()


class Stream:
    """The router's side of a stream."""

    def __init__(self, address: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0)])
        self.stub = shard_pb2_grpc.ShardStub(self.channel)
        self._commands: queue.Queue[pb.Command | None] = queue.Queue()
        self.messages = self.stub.Serve(iter(self._commands.get, None), timeout=TIMEOUT_S, metadata=metadata)
        self.outputs: dict[int, list[pb.RequestOutput]] = {}
        self.credit = pb.Credit()
        self.num_messages = 0

    def send(self, **values: object) -> None:
        self._commands.put(pb.Command(**values))

    def next_message(self) -> pb.StepOutput:
        """Raises StopIteration at the end, or grpc.RpcError."""
        return next(self.messages)

    def read(self) -> pb.StepOutput:
        message = self.next_message()
        assert len({output.id for output in message.outputs}) == len(message.outputs)
        assert message.ByteSize() < 4 << 20
        self.num_messages += 1
        self.credit = message.credit
        for output in message.outputs:
            self.outputs.setdefault(output.id, []).append(output)
        return message

    def read_until_ended(self, *ids: int) -> None:
        while not all(request_id in self.outputs and self.reason(request_id) for request_id in ids):
            self.read()

    def reason(self, request_id: int) -> int:
        return self.outputs[request_id][-1].finish_reason

    def error(self, request_id: int) -> str:
        return self.outputs[request_id][-1].error

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def close(self) -> None:
        self._commands.put(None)
        self.messages.cancel()
        self.channel.close()


@pytest.fixture
def connect() -> Iterator[Callable[[Shard], Stream]]:
    streams = []

    def make(shard: Shard) -> Stream:
        streams.append(Stream(shard.address))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()


Make = Callable[..., Shard]
Connect = Callable[[Shard], Stream]


def make_submit(request_id: int, prompt_ids: list[int], max_new_tokens: int = 8, **values: object) -> pb.Submit:
    submit = pb.Submit(id=request_id, prompt_ids=prompt_ids, max_new_tokens=max_new_tokens, sampling=NEUTRAL)
    submit.MergeFrom(pb.Submit(**values))
    return submit


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_calls_wait_until_the_shard_is_ready(tmp_path: Path) -> None:
    shard = Shard(tmp_path, Setup())
    assert stat.S_IMODE(os.stat(shard.path).st_mode) == 0o600
    with grpc.insecure_channel(shard.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert health.Check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.NOT_SERVING
        info = shard_pb2_grpc.ShardStub(channel).Info.future(pb.InfoRequest(), timeout=TIMEOUT_S)
        assert not info.done()
        shard.ready()
        assert info.result().model_id == "fake"
        assert health.Check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING
    shard.stop()


def test_a_hundred_submits_in_one_message(make_shard: Make, connect: Connect) -> None:
    stream = connect(make_shard(max_running=100))
    prompts = {i: [i % 61, (7 * i) % 61, 3] for i in range(1, 101)}
    stream.send(submits=[make_submit(i, prompt) for i, prompt in prompts.items()])
    stream.read_until_ended(*prompts)
    assert all(stream.tokens(i) == generate_alone(prompt, 8) for i, prompt in prompts.items())
    assert stream.credit.acknowledged == 100


def test_a_message_with_many_requests_is_read_in_parts(make_shard: Make, connect: Connect) -> None:
    """Another router's requests come between them."""
    submits = [make_submit(number, [number % 61, 3]) for number in range(1, 201)]
    command = pb.Command(submits=submits, abort_ids=[7], watch_ms=5)
    parts = divided(command)
    assert [len(part.submits) for part in parts] == [32] * 6 + [8]
    assert [(list(part.abort_ids), part.watch_ms) for part in parts] == [([], 0)] * 6 + [([7], 5)]
    merged = pb.Command()
    for part in parts:
        merged.MergeFrom(part)
    assert merged == command
    assert divided(parts[0]) == [parts[0]]
    shard = make_shard(max_running=256)
    many, few = connect(shard), connect(shard)
    many.send(submits=submits)
    few.send(submits=[make_submit(1, [5, 3])])
    few.read_until_ended(1)
    many.read_until_ended(*range(1, 201))


def test_credit_is_sent_at_once_and_with_every_heartbeat(make_shard: Make, connect: Connect) -> None:
    stream = connect(make_shard(num_pages=100))
    while not stream.credit.num_requests:
        stream.read()
    assert stream.credit.num_kv_tokens == 400
    assert stream.read().heartbeat.running_step == 0


def test_outputs_for_a_slow_reader_are_merged(make_shard: Make, connect: Connect) -> None:
    shard = make_shard()
    stream = connect(shard)
    logprobs = pb.Logprobs(wanted=True, alternatives=20)
    prompts = {i: [i, 2, 3] for i in range(8)}
    stream.send(submits=[make_submit(i, prompt, 200, logprobs=logprobs) for i, prompt in prompts.items()])
    wait_until(lambda: shard.rig.model.num_steps >= 200)
    stream.read_until_ended(*prompts)
    assert stream.num_messages < 150
    for i, prompt in prompts.items():
        assert stream.tokens(i) == generate_alone(prompt, 200)
        outputs = stream.outputs[i]
        assert b"".join(output.step_ends for output in outputs) == b"\1" * 200
        assert sum(len(output.alternative_ids) for output in outputs) == 20 * 200
        assert sum(len(output.logprobs) for output in outputs) == 200
    assert any(len(output.token_ids) > 1 for output in stream.outputs[0])


def test_a_stream_that_is_not_read_ends_and_others_go_on(
    make_shard: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_UNSENT_BYTES", 1 << 20)
    shard = make_shard()
    silent, other = connect(shard), connect(shard)
    logprobs = pb.Logprobs(wanted=True, alternatives=40)
    for first in range(0, 400, 8):  # the socket holds some of the outputs
        silent.send(submits=[make_submit(first + i, [i, 2, 3], 200, logprobs=logprobs) for i in range(8)])
    other.send(submits=[make_submit(1, [9], 60)])
    other.read_until_ended(1)
    assert other.tokens(1) == generate_alone([9], 60)
    wait_until(lambda: shard.rig.scheduler.is_idle)
    with pytest.raises(grpc.RpcError) as ended:
        for _ in range(100_000):
            silent.read()
    assert ended.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for i, outputs in silent.outputs.items():
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == generate_alone([i % 8, 2, 3], 200)[: len(tokens)], "nothing is missing within what was sent"
    other.send(submits=[make_submit(2, [8], 20)])
    other.read_until_ended(2)
    shard.rig.assert_clean()


def test_two_routers_may_use_the_same_ids(make_shard: Make, connect: Connect) -> None:
    shard = make_shard()
    one, two = connect(shard), connect(shard)
    one.send(submits=[make_submit(1, [1, 2, 3])])
    two.send(submits=[make_submit(1, [4, 5])])
    one.read_until_ended(1)
    two.read_until_ended(1)
    assert one.tokens(1) == generate_alone([1, 2, 3], 8)
    assert two.tokens(1) == generate_alone([4, 5], 8)
    assert (one.credit.acknowledged, two.credit.acknowledged) == (1, 1)


def test_an_aborted_request_ends_and_frees_its_pages(make_shard: Make, connect: Connect) -> None:
    shard = make_shard()
    stream = connect(shard)
    stream.send(submits=[make_submit(1, [1, 2], 500)])
    stream.read()
    stream.send(abort_ids=[1, 99])
    stream.read_until_ended(1)
    assert stream.reason(1) == pb.FINISH_ABORTED
    wait_until(lambda: shard.rig.scheduler.is_idle)
    shard.rig.assert_clean()


def test_a_router_that_disconnects_frees_its_pages(make_shard: Make, connect: Connect) -> None:
    shard = make_shard()
    gone, stays = connect(shard), connect(shard)
    stays.send(submits=[make_submit(1, [9], 60)])
    gone.send(submits=[make_submit(i, [i, 2], 500) for i in range(5)])
    gone.read()
    gone.close()
    stays.read_until_ended(1)
    wait_until(lambda: shard.rig.scheduler.is_idle)
    shard.rig.assert_clean()


BAD_SUBMITS = {
    "the prompt is empty": make_submit(1, []),
    "outside the vocabulary": make_submit(1, [1, VOCAB_SIZE]),
    "prompt and max_new_tokens make 601": make_submit(1, [1], 600),
    "the KV memory holds 400": make_submit(1, [1], 500),
    "max_new_tokens leaves nothing": make_submit(1, [1, 2, 3], 1, num_emitted=1),
    "leaves no token of the prompt": make_submit(1, [1, 2], 5, num_emitted=2),
    "this shard serves no adapters": make_submit(1, [1], adapter=pb.AdapterPin(digest="d" * 64)),
    "the speculation method medusa": make_submit(1, [1], speculation=pb.Speculation(method="medusa")),
    "the speculation schedule twice": make_submit(1, [1], speculation=pb.Speculation(schedule="twice")),
    "the speculation verification typical": make_submit(1, [1], speculation=pb.Speculation(verify="typical")),
    "alternatives can be returned": make_submit(1, [1], logprobs=pb.Logprobs(alternatives=VOCAB_SIZE + 1)),
    "temperature is out of range": make_submit(1, [1], sampling=pb.Sampling(temperature=float("nan"))),
    "top_p is out of range": make_submit(1, [1], sampling=pb.Sampling(top_p=1.5)),
    "differ in length": make_submit(1, [1], sampling=pb.Sampling(bias_ids=[1])),
    "of the logit bias": make_submit(1, [1], sampling=pb.Sampling(bias_ids=[61], bias_values=[1])),
}


def test_invalid_requests_fail_with_a_message(make_shard: Make, connect: Connect) -> None:
    shard = make_shard(num_pages=100)
    stream = connect(shard)
    submits = []
    for i, submit in enumerate(BAD_SUBMITS.values()):
        submit.id = i
        submits.append(submit)
    stream.send(submits=[*submits, make_submit(100, [1, 2])])
    stream.read_until_ended(*range(len(submits)), 100)
    for i, sentence in enumerate(BAD_SUBMITS):
        assert stream.reason(i) == pb.FINISH_ERROR
        assert sentence in stream.error(i)
    assert stream.tokens(100) == generate_alone([1, 2], 8)
    assert stream.credit.acknowledged == len(submits) + 1


def test_a_shard_without_adapters_reports_a_prefetch_as_failed(make_shard: Make, connect: Connect) -> None:
    stream = connect(make_shard())
    digest = "d1" * 32
    stream.send(prefetches=[pb.AdapterPin(digest=digest)])
    states: list[pb.AdapterState] = []
    while not states:
        states = list(stream.read().adapters)
    assert (states[0].digest, states[0].residency) == (digest, pb.AdapterState.FAILED)
    assert states[0].reason == "this shard serves no adapters"


def test_a_shard_that_ends_finishes_its_requests(tmp_path: Path, connect: Connect) -> None:
    shard = Shard(tmp_path, Setup(num_pages=1000))
    shard.ready()
    stream = connect(shard)
    stream.send(submits=[make_submit(1, [1, 2], 60)])
    while 1 not in stream.outputs:  # the first message has no outputs
        stream.read()
    ender = threading.Thread(target=shard.stop)
    ender.start()
    with pytest.raises(StopIteration):
        while True:
            stream.read()
    ender.join(TIMEOUT_S)
    assert stream.tokens(1) == generate_alone([1, 2], 60)


def test_an_address_that_cannot_be_bound_is_an_error(make_shard: Make, tmp_path: Path) -> None:
    shard = make_shard()
    server = Server("unix:/nonexistent/folder/shard.sock", shard.rig.inbox, shard.rig.outbox)
    with pytest.raises(OSError, match="cannot listen"):
        server.start()


def test_a_wait_cancelled_while_it_ends_is_cancelled() -> None:
    async def cancel_at_the_end() -> bool:
        event = asyncio.Event()
        waiting = asyncio.create_task(wait_for_event(event, 60))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        event.set()
        waiting.cancel()
        await asyncio.wait([waiting])
        return waiting.cancelled()

    assert asyncio.run(cancel_at_the_end())


def test_the_digest_of_its_files_or_an_error_if_they_have_changed(
    make_shard: Callable[..., Shard], tmp_path: Path
) -> None:
    shard = make_shard()
    with grpc.insecure_channel(shard.address) as channel:
        stub = shard_pb2_grpc.ShardStub(channel)
        reply = stub.Digest(pb.DigestRequest(), timeout=TIMEOUT_S)
        assert reply.sha256 == digest.of_files(tmp_path, ["config.json"])
    (tmp_path / "later").mkdir()
    late = Shard(tmp_path / "later", Setup(num_pages=10))
    (tmp_path / "later" / "config.json").write_text("changed")
    late.ready()
    try:
        with grpc.insecure_channel(late.address) as channel, pytest.raises(grpc.RpcError) as caught:
            shard_pb2_grpc.ShardStub(channel).Digest(pb.DigestRequest(), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "have changed since they were loaded" in caught.value.details()
    finally:
        late.stop()
