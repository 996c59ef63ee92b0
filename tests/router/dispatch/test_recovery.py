"""Requests whose shard is lost continue on another one, or on its successor, with the same output."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import SamplingParams
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.errors import GenerationFailed, NoShard, PoisonRequest
from lorikeet.router.requests.generation import Generation, PoisonRequestTracker
from lorikeet.router.requests.request import FinishReason, GenerationRequest
from lorikeet.router.shards.link import HEARTBEAT_SECONDS, MAX_MISSED
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router import simulated_shard
from tests.router.simulated_shard import SimulatedModel, SimulatedShard
from tests.router.text.vocabularies import byte_level

pytestmark = pytest.mark.anyio

WORDS = tuple(range(200, 240))


class Fleet:
    """A dispatcher over simulated shards that can be ended and started."""

    def __init__(self, folder: Path, num_shards: int, **fields: Any) -> None:
        self.folder = folder
        self.addresses = tuple(f"unix:{folder}/shard-{index}.sock" for index in range(num_shards))
        self.marks = tuple(str(folder / f"shard-{index}.stuck") for index in range(num_shards))
        self.tokenizer = Tokenizer(byte_level(), eos_ids=frozenset({1}))
        config = RouterConfig("model", str(folder), self.addresses, stuck_files=self.marks, **fields)
        self.dispatcher = Dispatcher(config, self.tokenizer)
        self.submits: list[list[pb.Submit]] = [[] for _ in range(num_shards)]
        self.shards: dict[int, tuple[grpc.aio.Server, SimulatedShard, asyncio.Task[None]]] = {}

    async def start(self, index: int, step_seconds: float = 0.005, max_running: int = 512) -> SimulatedShard:
        def note(command: pb.Command) -> None:
            self.submits[index] += command.submits

        model = SimulatedModel(step_seconds, max_running, token_ids=WORDS, on_command=note)
        self.shards[index] = await simulated_shard.start(self.addresses[index], model)
        await self.until(lambda: self.dispatcher.links[index].ready)
        return self.shards[index][1]

    async def end(self, index: int) -> None:
        server, _, steps = self.shards.pop(index)
        steps.cancel()
        await server.stop(0)
        await self.until(lambda: not self.dispatcher.links[index].ready)

    @property
    def marked(self) -> list[bool]:
        """By shard: whether its parent process is asked to kill it."""
        return [Path(mark).exists() for mark in self.marks]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is waited for lies in several places
                await asyncio.sleep(0.002)

    def submit(self, num_tokens: int, seed: int = 1, **fields: Any) -> Generation:
        return self.dispatcher.submit(GenerationRequest([50] * 4, num_tokens, SamplingParams(seed=seed), **fields))


@asynccontextmanager
async def fleet(folder: Path, num_shards: int, **fields: Any) -> AsyncIterator[Fleet]:
    here = Fleet(folder, num_shards, **fields)
    await here.dispatcher.start()
    try:
        yield here
        await here.until(lambda: here.dispatcher.num_active == 0)
    finally:
        await here.dispatcher.stop()
        for server, _, steps in here.shards.values():
            steps.cancel()
            await server.stop(0)
        here.tokenizer.close()


def text_of(seed: int, num_tokens: int) -> list[int]:
    """The output of a simulated shard, wherever the request continues."""
    return [WORDS[(seed * 37 + index) % len(WORDS)] for index in range(num_tokens)]


async def ids_of(generation: Generation) -> list[int]:
    return [token.id async for chunk in generation for token in chunk.tokens]


async def test_requests_of_a_lost_shard_continue_elsewhere(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2) as here:
        for index in range(2):
            await here.start(index)
        made = [here.submit(200, seed) for seed in range(12)]
        reading = [asyncio.create_task(ids_of(generation)) for generation in made]
        await here.until(lambda: all(generation.num_generated > 20 for generation in made))
        lost = [generation for generation in made if generation.routing.shard_address == here.addresses[0]]
        assert 0 < len(lost) < 12
        await here.end(0)
        assert [await task for task in reading] == [text_of(seed, 200) for seed in range(12)]
        moved = [submit for submit in here.submits[1] if submit.num_emitted]
        assert len(moved) == len(lost)
        for submit in moved:
            assert list(submit.prompt_ids) == [50] * 4 + text_of(submit.seed, submit.num_emitted)
            assert (submit.max_new_tokens, submit.isolation_steps > 0) == (200, True)
        assert here.dispatcher.metrics.requests_retried.values[""] == len(lost)


async def test_requests_wait_for_the_only_shard_to_return(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as here:
        await here.start(0, max_running=1)
        running, queued = here.submit(300), here.submit(3, 2)
        await running.next()
        await here.end(0)
        assert here.dispatcher.healthy and not here.dispatcher.ready
        late = here.submit(3, 3)
        got = running.emitted_ids[:]
        await here.start(0)
        assert here.dispatcher.healthy
        await ids_of(running)
        assert running.emitted_ids == text_of(1, 300) and running.emitted_ids[: len(got)] == got
        assert [await ids_of(queued), await ids_of(late)] == [text_of(2, 3), text_of(3, 3)]
        assert [submit.seed for submit in here.submits[0]][-3:] == [1, 2, 3]


async def test_requests_wait_while_the_only_shard_shuts_down(tmp_path: Path) -> None:
    """It finishes its requests and accepts no new ones; its successor has not started yet."""
    async with fleet(tmp_path, 2) as here:
        shard = await here.start(0)
        running = here.submit(200)
        await running.next()
        await shard.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await here.until(lambda: not here.dispatcher.ready)
        late = here.submit(3, 2)
        assert here.dispatcher.healthy
        await ids_of(running)
        assert running.emitted_ids == text_of(1, 200) and not running.routing.num_retries
        await here.start(1)
        assert await ids_of(late) == text_of(2, 3)


async def test_a_request_waits_no_longer_than_the_recovery_may_take(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, recovery_timeout_s=0.3) as here:
        await here.start(0)
        running = here.submit(100_000)
        await running.next()
        await here.end(0)
        with pytest.raises(NoShard):
            await ids_of(running)
        assert not here.dispatcher.healthy
        with pytest.raises(NoShard):
            here.submit(3)
        await here.start(0)
        assert await ids_of(here.submit(3)) == text_of(1, 3)


async def test_requests_do_not_wait_for_a_shard_while_draining(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as here:
        await here.start(0)
        running = here.submit(100_000)
        await running.next()
        await here.end(0)
        assert await here.dispatcher.drain(10)
        with pytest.raises(NoShard):
            await ids_of(running)


async def test_a_silent_shard_is_taken_out(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2) as here:
        silent, _ = await here.start(0), await here.start(1)
        made = [here.submit(100, seed) for seed in range(4)]
        silent.may_end.clear()
        silent.is_mute = True
        assert [await ids_of(generation) for generation in made] == [text_of(seed, 100) for seed in range(4)]
        assert here.marked == [True, False]
        silent.may_end.set()
        silent.is_mute = False
        await here.until(lambda: here.dispatcher.links[0].ready)


async def test_a_suspended_router_misses_no_heartbeat(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as here:
        await here.start(0)
        client = here.dispatcher.links[0].client
        time.sleep(HEARTBEAT_SECONDS * MAX_MISSED + 0.3)  # noqa: ASYNC251 - what it is about: nothing of this loop runs
        await asyncio.sleep(HEARTBEAT_SECONDS)
        assert await ids_of(here.submit(3)) == text_of(1, 3)
        assert client.connected and not client.is_taken_out


async def test_a_shard_whose_step_hangs_is_taken_out(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, step_timeout_s=0.5) as here:
        hanging, _ = await here.start(0), await here.start(1)
        made = [here.submit(100, seed) for seed in range(4)]
        hanging.may_end.clear()
        hanging.running_ms = 501
        assert [await ids_of(generation) for generation in made] == [text_of(seed, 100) for seed in range(4)]
        assert here.marked == [True, False]
        hanging.may_end.set()
        hanging.running_ms = 0


async def test_only_the_request_that_crashes_shards_fails(tmp_path: Path) -> None:
    """A shard crashes in a step of two requests; the next one crashes in a step of only the first of them."""
    async with fleet(tmp_path, 1) as here:
        shard = await here.start(0)
        poison, other = here.submit(1000, 1), here.submit(1000, 2)
        await poison.next(), await other.next()
        await here.end(0)
        shard = await here.start(0, step_seconds=2.0)
        await here.until(lambda: shard.num_running == 2)
        assert [submit.isolation_steps > 0 for submit in here.submits[0][-2:]] == [True, True]
        (link,) = here.dispatcher.links
        await here.until(
            lambda: link.step_requests == {poison.routing.wire_id, other.routing.wire_id}
        )  # as reported by the shard itself
        alone = pb.StepRequests(ids=[poison.routing.wire_id])
        here.dispatcher.on_output(link, pb.StepOutput(step_requests=alone))
        await here.end(0)
        with pytest.raises(PoisonRequest):
            await ids_of(poison)
        await here.start(0)
        await ids_of(other)
        assert other.emitted_ids == text_of(2, 1000)


async def test_a_cleared_request_survives_any_number_of_crashes(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as here:
        await here.start(0)
        made = here.submit(1500)
        await here.until(lambda: made.num_generated > 0)
        for num_crashes in range(1, 4):
            await here.end(0)
            await here.start(0)
            poison_tracker = made.routing.poison_tracker
            assert poison_tracker.num_crashes == num_crashes
            await here.until(lambda trial=poison_tracker: trial.isolation_steps == 0)  # type: ignore[misc]
        await ids_of(made)
        assert made.emitted_ids == text_of(1, 1500)


@pytest.mark.parametrize("computed", [True, False])
async def test_a_retryable_error_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: bool) -> None:
    """A failed step makes its requests suspects, and fails one that was isolated; a rejection does neither."""
    async with fleet(tmp_path, 1) as here:
        shard = await here.start(0)
        made = here.submit(50)
        (link,) = here.dispatcher.links
        lost = list[str]()
        monkeypatch.setattr(here.dispatcher.metrics, "generation_lost", lost.append)

        def fail() -> None:
            shard.may_end.clear()
            error = pb.RequestOutput(
                id=made.routing.wire_id,
                finish_reason=pb.FINISH_ERROR,
                error="the step failed: X",
                retryable=True,
                in_step=computed,
            )
            here.dispatcher.on_output(link, pb.StepOutput(outputs=[error]))
            shard.may_end.set()

        await made.next()
        fail()
        await here.until(lambda: made.routing.wire_id in link.running)
        assert made.routing.num_retries == 1
        if computed:
            fail()
            with pytest.raises(GenerationFailed, match="the step failed"):
                await ids_of(made)
            assert here.dispatcher.metrics.gauges["lorikeet_active_requests"] == 0
            assert lost == ["error"]
            assert await here.dispatcher.drain(1)  # nothing runs
        else:
            await ids_of(made)
            assert made.emitted_ids == text_of(1, 50)
            assert made.routing.poison_tracker == PoisonRequestTracker()


async def test_a_lost_finish_reason_is_derived_from_the_tokens(tmp_path: Path) -> None:
    """The last token arrived, and the shard was lost before it sent the finish reason."""
    async with fleet(tmp_path, 1) as here:
        shard = await here.start(0)
        shard.may_end.clear()
        full, ended = here.submit(2), here.submit(9)
        await here.until(lambda: shard.num_running == 2)
        outputs = [pb.RequestOutput(id=full.routing.wire_id, token_ids=[200, 201], step_ends=b"\1\1")]
        outputs.append(pb.RequestOutput(id=ended.routing.wire_id, token_ids=[200, 1], step_ends=b"\1\1"))
        here.dispatcher.on_output(here.dispatcher.links[0], pb.StepOutput(outputs=outputs))
        shard.may_end.set()
        await here.end(0)
        reasons = [[chunk.finish_reason async for chunk in generation][-1] for generation in (full, ended)]
        assert reasons == [FinishReason.LENGTH, FinishReason.EOS_TOKEN]
