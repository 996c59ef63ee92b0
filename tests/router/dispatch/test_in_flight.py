"""Sequences in flight: limits are max-min fair, a short request starts at once, and what is taken back continues."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from lorikeet.proto import shares
from lorikeet.proto.params import SamplingParams
from lorikeet.router.dispatch import fair_queue
from lorikeet.router.dispatch.fair_queue import InFlight
from tests.router.dispatch.test_dispatcher import WORDS, ids_of, request, stage
from tests.router.serving import serving
from tests.router.simulated_shard import SimulatedModel

ROOM = 8


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_ROOM", "DEVICE_ROOM"):
        monkeypatch.setattr(shares, name, ROOM)


pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("rooms")]


async def test_a_caller_alone_gets_everything(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        flood = [here.dispatcher.submit(request(1000, caller="flood")) for _ in range(100)]
        await here.until(lambda: all(generation.num_generated for generation in flood))
        assert here.shard.num_running == 100
        assert here.shard.nums_held == [*range(99, -1, -1)], "a shard knows how many wait in the router"
        for generation in flood:
            generation.cancel()


async def test_a_short_request_of_another_caller_starts_at_once(tmp_path: Path) -> None:
    async with stage(tmp_path, SimulatedModel(max_running=32)) as here:
        flood = [here.dispatcher.submit(request(2000, caller="flood")) for _ in range(100)]
        await here.until(lambda: here.shard.num_running == 32)
        step = here.shard.num_steps
        short = here.dispatcher.submit(request(2, caller="short"))
        assert len(await ids_of(short)) == 2
        assert here.shard.num_steps - step <= 12
        running = here.dispatcher.in_flight.running
        assert running["flood"] <= ROOM
        taken_back = here.dispatcher.metrics.requests_taken_back.values
        assert taken_back["addresses"] >= 32 - ROOM
        await asyncio.sleep(0)
        for generation in flood:
            generation.cancel()


async def test_callers_that_all_ask_for_much_share_all_of_a_shard(tmp_path: Path) -> None:
    async with stage(tmp_path, SimulatedModel(max_running=32)) as here:
        floods = [here.dispatcher.submit(request(2000, caller="a")) for _ in range(100)]
        await here.until(lambda: here.shard.num_running == 32)
        floods += [here.dispatcher.submit(request(2000, caller="b")) for _ in range(100)]
        await here.until(lambda: here.dispatcher.in_flight.running == {"a": 16, "b": 16})
        for generation in floods:
            generation.cancel()


async def test_what_is_taken_back_continues_where_it_was(tmp_path: Path) -> None:
    async with stage(tmp_path, SimulatedModel(max_running=32)) as here:
        flood = [
            here.dispatcher.submit(request(60, caller="flood", sampling=SamplingParams(seed=seed)))
            for seed in range(40)
        ]
        reading = [asyncio.create_task(ids_of(generation)) for generation in flood]
        await here.until(lambda: sum(generation.num_generated > 5 for generation in flood) == 32)
        for _ in range(10):
            await ids_of(here.dispatcher.submit(request(3, caller="short")))
        outputs = await asyncio.gather(*reading)
        assert here.dispatcher.metrics.requests_taken_back.values["addresses"]
        for ids in outputs:
            start = WORDS.index(ids[0])
            assert ids == [WORDS[(start + index) % len(WORDS)] for index in range(60)]
        assert not here.dispatcher.metrics.requests_retried.values.get("")


async def test_many_callers_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What callers have in excess is asked for with every batch, so sequences are counted once, not for each caller."""
    async with stage(tmp_path, SimulatedModel(max_running=32)) as here:
        flood = [here.dispatcher.submit(request(2000, caller=f"{number % 50}")) for number in range(100)]
        await here.until(lambda: here.shard.num_running == 32)
        num_counts, running = 0, here.dispatcher.in_flight.running

        def count(_: InFlight) -> Counter[str]:
            nonlocal num_counts
            num_counts += 1
            return running

        monkeypatch.setattr(InFlight, "running", property(count))
        assert len(here.dispatcher.in_flight.limits) > 10
        assert not list(here.dispatcher.in_flight.excess())
        assert num_counts == 1
        monkeypatch.undo()
        for generation in flood:
            generation.cancel()


async def test_a_chosen_request_gets_the_room_that_is_made_for_it(tmp_path: Path) -> None:
    """The caller that owes more gets the room, though the request that was taken back for it owes less."""
    async with stage(tmp_path, SimulatedModel(kv_tokens=400)) as here:
        long = [here.dispatcher.submit(request(200, num_prompt=200, caller="long")) for _ in range(3)]
        await here.until(lambda: all(generation.num_generated for generation in long))
        await ids_of(here.dispatcher.submit(request(1, caller="debtor")))
        here.dispatcher.queue.charge("", 10_000, "debtor")
        async with asyncio.timeout(10):
            short = here.dispatcher.submit(request(2, num_prompt=500, caller="debtor"))
            assert len(await ids_of(short)) == 2
            assert here.dispatcher.metrics.requests_taken_back.values["addresses"]
            assert [len(await ids_of(generation)) for generation in long] == [200] * 3


async def test_callers_that_have_gone_are_not_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as server:
        server.says("a" * 5)
        assert (await server.client.post("/generate", json={"inputs": "Hi"})).status_code == 200
        assert "lorikeet_active_callers 1.0" in (await server.client.get("/metrics")).text
        monkeypatch.setattr(fair_queue, "RECENT_S", 0.0)
        assert "lorikeet_active_callers 0.0" in (await server.client.get("/metrics")).text


async def test_shares_of_keys_are_in_the_metrics(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        await ids_of(here.dispatcher.submit(request(3, caller="key:team", share=2.0)))
        await ids_of(here.dispatcher.submit(request(5, caller="address:192.0.2.1")))
        assert here.dispatcher.metrics.caller_tokens.values == {"team": 7, "addresses": 9}
        assert here.dispatcher.metrics.gauges["lorikeet_active_callers"] == 2
        text = here.dispatcher.metrics.prometheus(lambda name: False).decode()
        assert "team" not in text and 'lorikeet_caller_tokens_total{caller="other"} 7' in text
