"""The dispatcher with a simulated shard over a real socket: batches, credit, ends, and a lost shard."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import LogprobParams, Method, SamplingParams, Speculation
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.errors import (
    DeadlineExceeded,
    GenerationFailed,
    ModelLoading,
    Overloaded,
    QueueTimeout,
    ShuttingDown,
    ValidationError,
)
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import FinishReason, GenerationRequest
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router import simulated_shard
from tests.router.simulated_shard import SimulatedModel, SimulatedShard
from tests.router.text.vocabularies import byte_level

pytestmark = pytest.mark.anyio

WORDS = tuple(range(200, 240))


@dataclass
class Stage:
    """A dispatcher, its shard, and every message that the shard received."""

    dispatcher: Dispatcher
    shard: SimulatedShard
    server: grpc.aio.Server
    address: str
    commands: list[pb.Command] = field(default_factory=list)

    @property
    def batches(self) -> list[int]:
        return [len(command.submits) for command in self.commands if command.submits]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is waited for lies in several places
                await asyncio.sleep(0.002)

    async def idle(self) -> None:
        await self.until(lambda: self.dispatcher.num_active == 0 and self.shard.num_running == 0)


@asynccontextmanager
async def stage(folder: Path, model: SimulatedModel | None = None, **fields: Any) -> AsyncIterator[Stage]:
    model = model or SimulatedModel()
    model.token_ids = WORDS
    commands: list[pb.Command] = []
    model.on_command = commands.append
    address = f"unix:{folder}/shard.sock"
    server, shard, steps = await simulated_shard.start(address, model)
    tokenizer = Tokenizer(byte_level(), eos_ids=frozenset({1}))
    dispatcher = Dispatcher(RouterConfig("model", str(folder), (address,), **fields), tokenizer)
    await dispatcher.start()
    here = Stage(dispatcher, shard, server, address, commands)
    try:
        await here.until(lambda: dispatcher.ready)
        yield here
    finally:
        await dispatcher.stop()
        steps.cancel()
        await server.stop(0)
        tokenizer.close()


def request(num_tokens: int = 3, num_prompt: int = 4, **fields: Any) -> GenerationRequest:
    return GenerationRequest([50] * num_prompt, num_tokens, **{"sampling": SamplingParams(seed=1), **fields})


async def ids_of(generation: Generation) -> list[int]:
    return [token.id async for chunk in generation for token in chunk.tokens]


async def test_output_is_complete_and_in_order(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        generation = here.dispatcher.submit(request(12))
        ids = await ids_of(generation)
        start = WORDS.index(ids[0])
        assert ids == [WORDS[(start + index) % len(WORDS)] for index in range(12)]
        assert generation.emitted_ids == ids
        assert generation.routing.queued_at <= generation.routing.sent_at <= generation.first_token_at
        assert here.dispatcher.info is not None
        assert here.dispatcher.info.model_id == "simulated"
        assert here.dispatcher.healthy


async def test_gauges_count_a_request_from_the_moment_it_is_queued(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        gauges = here.dispatcher.metrics.gauges
        generation = here.dispatcher.submit(request(1))
        assert (gauges["lorax_queue_length"], gauges["lorikeet_active_requests"]) == (1, 1)
        await ids_of(generation)
        assert (gauges["lorax_queue_length"], gauges["lorikeet_active_requests"]) == (0, 0)


@pytest.mark.parametrize("spread_seconds", [0.0, 0.1])
@pytest.mark.parametrize("busy", [False, True])
async def test_a_hundred_requests_within_one_step_travel_in_two_messages(
    tmp_path: Path, spread_seconds: float, busy: bool
) -> None:
    async with stage(tmp_path, SimulatedModel(step_seconds=0.05)) as here:
        shard = here.shard
        running = []
        if busy:
            running = [here.dispatcher.submit(request(1000)) for _ in range(2)]
            await running[0].next()
        shard.may_end.clear()
        if busy:
            await here.until(lambda: shard.is_held and running[1].num_generated == shard.num_steps)
        here.commands.clear()
        made = []
        for _ in range(100):
            made.append(here.dispatcher.submit(request(1)))
            await asyncio.sleep(spread_seconds / 100)
        shard.may_end.set()
        await asyncio.gather(*(ids_of(generation) for generation in made))
        assert sum(here.batches) == 100
        assert len(here.batches) <= 2
        for generation in running:
            generation.cancel()


async def test_batches_stay_within_the_credit(tmp_path: Path) -> None:
    async with stage(tmp_path, SimulatedModel(max_running=7)) as here:
        most = 0

        def watch(command: pb.Command) -> None:
            nonlocal most
            most = max(most, here.shard.num_running + len(command.submits))

        here.shard._model.on_command = watch
        made = [here.dispatcher.submit(request(2 + index % 5)) for index in range(60)]
        assert len(here.dispatcher.queue) > 0
        texts = await asyncio.gather(*(ids_of(generation) for generation in made))
        assert [len(ids) for ids in texts] == [2 + index % 5 for index in range(60)]
        assert most <= 7


async def test_an_idle_shard_gets_a_request_beyond_its_kv_credit(tmp_path: Path) -> None:
    async with stage(tmp_path, SimulatedModel(step_seconds=0.02, kv_tokens=100)) as here:
        small, large = here.dispatcher.submit(request(2, 10)), here.dispatcher.submit(request(2, 150))
        await small.next()
        assert here.batches == [1]
        assert len(await ids_of(large)) == 2


async def test_a_shard_where_all_wait_for_adapters_gets_the_next_request_at_once(tmp_path: Path) -> None:
    """It runs no step at whose end a batch could be sent."""
    async with stage(tmp_path) as here:
        here.shard.may_end.clear()
        first = here.dispatcher.submit(request())
        await here.until(lambda: here.shard.is_held)
        (link,) = here.dispatcher.links
        parked = pb.StepOutput(credit=pb.Credit(num_requests=9, num_kv_tokens=999, acknowledged=1), load=pb.Load())
        here.dispatcher.on_output(link, parked)
        second = here.dispatcher.submit(request())
        await here.until(lambda: here.batches == [1, 1])
        here.shard.may_end.set()
        await ids_of(first), await ids_of(second)


async def test_large_batches_are_split_below_four_mebibytes(tmp_path: Path) -> None:
    async with stage(tmp_path, SimulatedModel(step_seconds=0.05, kv_tokens=1 << 30)) as here:
        here.dispatcher.submit(request(1))
        made = [here.dispatcher.submit(GenerationRequest([300_000] * 200_000, 1)) for _ in range(20)]
        await asyncio.gather(*(ids_of(generation) for generation in made))
        assert max(command.ByteSize() for command in here.commands) < 4 << 20
        assert sum(here.batches) == 21


async def test_all_fields_of_a_request_are_sent(tmp_path: Path) -> None:
    sampling = SamplingParams(True, 0.7, 5, 0.9, 0.1, 0.8, 1.5, 0.25, 0.5, ((7, 1.5), (9, -2.0)), True, seed=1 << 60)

    async with stage(tmp_path) as here:
        asked = GenerationRequest(
            prompt_ids=[5, 6],
            max_new_tokens=1,
            sampling=sampling,
            logprobs=LogprobParams(wanted=True, alternatives=3, raw=True, prefill=True, prefill_alternatives=2),
            cache_salt="s",
        )
        await ids_of(here.dispatcher.submit(asked, deadline=time.monotonic() + 10))
        await ids_of(here.dispatcher.submit(request(1, ignore_eos=True, logprobs=LogprobParams())))
        first, second = (submit for command in here.commands for submit in command.submits)
        assert list(first.prompt_ids) == [5, 6]
        assert (first.seed, first.cache_salt) == (1 << 60, "s")
        assert list(first.stop_ids) == [1]
        assert 9000 < first.deadline_ms <= 10_000
        assert first.logprobs == pb.Logprobs(
            wanted=True, alternatives=3, prefill=True, mode=pb.Logprobs.RAW, prefill_alternatives=2
        )
        names = ("do_sample", "top_k", "watermark")
        assert [getattr(first.sampling, name) for name in names] == [True, 5, True]
        reals = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty")
        reals += ("frequency_penalty", "presence_penalty")
        for name in reals:
            assert getattr(first.sampling, name) == pytest.approx(getattr(sampling, name))
        assert list(first.sampling.bias_ids) == [7, 9]
        assert list(first.sampling.bias_values) == [1.5, -2.0]
        assert not second.stop_ids
        assert second.deadline_ms == 0
        assert not second.logprobs.wanted


async def test_a_stop_string_aborts_in_the_shard(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        text = byte_level().decode([WORDS[3]])
        generation = here.dispatcher.submit(request(100_000, stop_strings=(text,)))
        chunks = [chunk async for chunk in generation]
        assert chunks[-1].finish_reason is FinishReason.STOP_SEQUENCE
        assert chunks[-1].text.endswith(text)
        await here.idle()
        assert len(here.shard.aborted_ids) == 1


async def test_cancelled_requests_leave_no_trace(tmp_path: Path) -> None:
    async with stage(tmp_path, SimulatedModel(max_running=2)) as here:
        made = [here.dispatcher.submit(request(100_000)) for _ in range(6)]
        await made[0].next()
        assert len(here.dispatcher.queue) == 4
        for generation in made:
            generation.cancel()
            generation.cancel()
        assert len(here.dispatcher.queue) == 0
        await here.idle()
        assert sorted(here.shard.aborted_ids) == [1, 2]
        with pytest.raises(GenerationFailed):
            async for _ in made[5]:
                pass


async def test_each_limit_raises_its_own_error(tmp_path: Path) -> None:
    model = SimulatedModel(max_running=1)
    async with stage(tmp_path, model, max_concurrent_requests=3, max_queue_seconds=0.05) as here:
        made = [here.dispatcher.submit(request(100_000)) for _ in range(3)]
        with pytest.raises(Overloaded) as refused:
            here.dispatcher.submit(request())
        assert refused.value.retry_after is not None
        assert refused.value.retry_after >= 1
        for late in made[1:]:
            with pytest.raises(QueueTimeout):
                await ids_of(late)
        late_for_all = here.dispatcher.submit(request(100_000), deadline=time.monotonic() + 0.01)
        with pytest.raises(DeadlineExceeded):
            await ids_of(late_for_all)
        made[0].cancel()
        await here.idle()
        running = here.dispatcher.submit(request(100_000), deadline=time.monotonic() + 0.1)
        with pytest.raises(DeadlineExceeded):
            await ids_of(running)
        assert running.num_generated > 0
        await here.idle()


async def test_an_expired_request_is_never_sent(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        with pytest.raises(DeadlineExceeded):
            here.dispatcher.submit(request(), deadline=time.monotonic() - 0.001)
        await ids_of(here.dispatcher.submit(request()))
        assert here.batches == [1]


async def test_the_configured_time_limit_applies_to_every_request(tmp_path: Path) -> None:
    async with stage(tmp_path, request_timeout_s=0.1) as here:
        with pytest.raises(DeadlineExceeded):
            await ids_of(here.dispatcher.submit(request(100_000)))


async def test_draining_finishes_what_runs_and_refuses_the_rest(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        running = here.dispatcher.submit(request(40))
        await running.next()
        draining = asyncio.create_task(here.dispatcher.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDown):
            here.dispatcher.submit(request())
        assert (await ids_of(running))[-1] == running.emitted_ids[39]
        assert await draining


async def test_draining_fails_what_takes_too_long(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        endless = here.dispatcher.submit(request(100_000))
        await endless.next()
        assert not await here.dispatcher.drain(0.05)
        with pytest.raises(ShuttingDown):
            await ids_of(endless)


async def test_malformed_output_fails_one_request(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        listed = LogprobParams(wanted=True, alternatives=1)
        broken, sound = (here.dispatcher.submit(request(20, logprobs=listed)) for _ in range(2))
        await sound.next()
        nonsense = pb.RequestOutput(id=broken.routing.wire_id, token_ids=[200], alternative_ids=[1, 2], logprobs=[-1.0])
        here.dispatcher.on_output(here.dispatcher.links[0], pb.StepOutput(outputs=[nonsense]))
        with pytest.raises(GenerationFailed, match="could not read"):
            await ids_of(broken)
        await ids_of(sound)
        assert sound.num_generated == 20
        await here.idle()
        assert here.shard.aborted_ids == [broken.routing.wire_id]


async def test_malformed_columns_fail_the_requests_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as here:
        lost = list[str]()
        monkeypatch.setattr(here.dispatcher.metrics, "generation_lost", lost.append)
        broken = here.dispatcher.submit(request(20))
        await broken.next()
        nonsense = pb.TokenColumns(ids=[broken.routing.wire_id], token_ids=[200, 201])
        here.dispatcher.on_output(here.dispatcher.links[0], pb.StepOutput(columns=[nonsense]))
        with pytest.raises(GenerationFailed, match="could not read"):
            await ids_of(broken)
        assert here.dispatcher.metrics.gauges["lorikeet_active_requests"] == 0
        assert lost == ["error"]
        await here.idle()
        assert here.shard.aborted_ids == [broken.routing.wire_id]
        assert await here.dispatcher.drain(1)


async def test_requests_fail_before_a_shard_is_connected(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level())
    dispatcher = Dispatcher(RouterConfig("model", "", (f"unix:{tmp_path}/none.sock",)), tokenizer)
    await dispatcher.start()
    assert not dispatcher.ready
    with pytest.raises(ModelLoading, match="The model is loading") as refused:
        dispatcher.submit(request())
    assert refused.value.retry_after is not None
    await dispatcher.stop()
    tokenizer.close()


async def test_a_slow_reader_gets_joined_output(tmp_path: Path) -> None:
    async with stage(tmp_path, SimulatedModel(step_seconds=0.001)) as here:
        made = [here.dispatcher.submit(request(50)) for _ in range(100)]
        await here.until(lambda: all(generation.num_generated == 50 for generation in made))
        for generation in made:
            chunk = await generation.next()
            assert len(chunk.tokens) == 50
            assert chunk.finish_reason is FinishReason.LENGTH


async def test_an_address_is_required(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level())
    with pytest.raises(ValueError, match="no shard address"):
        Dispatcher(RouterConfig("model", "", ()), tokenizer)
    tokenizer.close()


async def test_an_earlier_send_time_replaces_a_later_one(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        now, send_loop = time.monotonic(), here.dispatcher._send_loop
        send_loop._send_at(now + 60)
        late = send_loop._timer
        send_loop._send_at(now + 0.01)
        send_loop._send_at(now + 30)
        assert late is not None and late.cancelled()
        await here.until(lambda: send_loop._timer is None)
        assert time.monotonic() - now < 30


async def test_a_message_never_exceeds_the_shard_s_limit(tmp_path: Path) -> None:
    """The largest accepted request arrives; one more token is rejected, and the stream stays."""
    async with stage(tmp_path) as here:
        other = here.dispatcher.submit(request(200))
        with pytest.raises(ValidationError, match="fits a message") as caught:
            here.dispatcher.submit(request(1, 4 << 20))
        most = int(str(caught.value).split(" tokens together")[0].rpartition(" ")[2])
        speculation = Speculation(Method.LOOKUP, 2, prediction_ids=(8191,) * (most // 2))
        fields: dict[str, Any] = {"max_new_tokens": 1, "speculation": speculation}
        ids = [8191] * (most - most // 2)
        with pytest.raises(ValidationError):
            here.dispatcher.submit(GenerationRequest(prompt_ids=ids, **fields))
        largest = here.dispatcher.submit(GenerationRequest(prompt_ids=ids[1:], **fields))
        assert len(await ids_of(largest)) == 1
        assert len(await ids_of(other)) == 200
        assert max(command.ByteSize() for command in here.commands) > 3 << 20


async def test_a_full_server_accepts_a_caller_with_fewer_requests(tmp_path: Path) -> None:
    """The newest waiting request of the caller that has the most makes room, until both have as many."""
    async with stage(tmp_path, SimulatedModel(max_running=1), max_concurrent_requests=6) as here:
        here.shard.may_end.clear()
        flood = [here.dispatcher.submit(request(2, caller="flood"))]
        await here.until(lambda: here.shard.num_running == 1)
        flood += [here.dispatcher.submit(request(2, caller="flood")) for _ in range(5)]
        with pytest.raises(Overloaded):
            here.dispatcher.check_room(caller="flood")
        with pytest.raises(Overloaded):
            here.dispatcher.submit(request(2, caller="flood"))
        others = [here.dispatcher.submit(request(2, caller="other")) for _ in range(3)]
        with pytest.raises(Overloaded):
            here.dispatcher.submit(request(2, caller="other"))
        third = here.dispatcher.submit(request(2, caller="third"))
        assert here.dispatcher.num_active == 6
        here.shard.may_end.set()
        results = await asyncio.gather(*map(ids_of, [*flood, *others, third]), return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in results) == 4
        assert not isinstance(results[-1], BaseException)
        assert not isinstance(results[0], BaseException)


async def test_a_caller_whose_requests_all_run_does_not_lock_others_out(tmp_path: Path) -> None:
    """Nothing waits that could make room: an eighth more is for callers that have fewer, whose requests start."""
    async with stage(tmp_path, SimulatedModel(max_running=8), max_concurrent_requests=8) as here:
        flood = [here.dispatcher.submit(request(100_000, caller="flood")) for _ in range(8)]
        await here.until(lambda: here.shard.num_running == 8)
        with pytest.raises(Overloaded):
            here.dispatcher.submit(request(2, caller="flood"))
        assert len(await ids_of(here.dispatcher.submit(request(2, caller="other")))) == 2
        for generation in flood:
            generation.cancel()


async def test_the_room_beyond_the_limit_is_small(tmp_path: Path) -> None:
    async with stage(tmp_path, SimulatedModel(max_running=64), max_concurrent_requests=16) as here:
        flood = [here.dispatcher.submit(request(100_000, caller="flood")) for _ in range(16)]
        await here.until(lambda: here.shard.num_running == 16)
        others = [here.dispatcher.submit(request(100_000, caller=f"other {number}")) for number in range(2)]
        with pytest.raises(Overloaded):
            here.dispatcher.check_room(caller="third")
        for generation in (*flood, *others):
            generation.cancel()
