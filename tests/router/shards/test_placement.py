"""Several shards behind one router: requests go to the shard with their adapter or prefix, else to the least loaded."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.refs import Pin, SourceKind
from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, GenerationRequest
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router.scripted_loader import ScriptedLoader
from tests.router.scripted_shard import Script, ScriptedShard
from tests.router.text.vocabularies import byte_level

pytestmark = pytest.mark.anyio


class Replicas:
    """A dispatcher over several scripted shards and a scripted loader."""

    def __init__(self, dispatcher: Dispatcher, shards: list[ScriptedShard], loader: ScriptedLoader) -> None:
        self.dispatcher = dispatcher
        self.loader = loader
        self.shards = shards

    def submit(self, adapter: str | None = None, num_tokens: int = 2) -> Generation:
        named = None if adapter is None else Adapter(adapter, (Pin(SourceKind.LOCAL, adapter, "1"),))
        return self.dispatcher.submit(GenerationRequest([5, 6], num_tokens, adapter=named))

    def ask(self, prompt_ids: list[int], num_tokens: int = 2, **fields: Any) -> Generation:
        return self.dispatcher.submit(GenerationRequest(prompt_ids, num_tokens, **fields))

    def num_prompts(self, index: int, stem: list[int]) -> int:
        """Prompts with that beginning that a shard got."""
        return sum(list(submit.prompt_ids[: len(stem)]) == stem for submit in self.shards[index].submits)

    @property
    def reasons(self) -> dict[str, float]:
        return dict(self.dispatcher.metrics.routing_decisions.values)

    async def run(self, adapter: str | None = None) -> None:
        await whole(self.submit(adapter))

    @property
    def where(self) -> dict[str, Counter[int]]:
        """By adapter: how many of its requests each shard got."""
        counters: dict[str, Counter[int]] = defaultdict(Counter)
        for index, shard in enumerate(self.shards):
            for submit in shard.submits:
                counters[submit.adapter.id][index] += 1
        return counters


async def whole(generation: Generation) -> None:
    async for _ in generation:
        pass


@asynccontextmanager
async def replicas(folder: Path, number: int = 3, room: int = 256, **fields: Any) -> AsyncIterator[Replicas]:
    shards = []
    async with AsyncExitStack() as stack:
        for index in range(number):
            (folder / f"{index}").mkdir()
            shard = ScriptedShard(
                folder / f"{index}", lambda submit: Script([7] * submit.max_new_tokens), credit_requests=room
            )
            shards.append(await stack.enter_async_context(shard))
        loader = await stack.enter_async_context(ScriptedLoader(folder))
        tokenizer = Tokenizer(byte_level(), eos_ids=frozenset({1}))
        addresses = tuple(shard.address for shard in shards)
        config = RouterConfig("model", str(folder), addresses, loader_address=loader.address, **fields)
        dispatcher = Dispatcher(config, tokenizer)
        await dispatcher.start()
        try:
            await shards[0].until(lambda: all(link.ready for link in dispatcher.links))
            yield Replicas(dispatcher, shards, loader)
        finally:
            await dispatcher.stop()
            tokenizer.close()


async def test_an_adapter_s_requests_stay_together_and_adapters_spread(tmp_path: Path) -> None:
    async with replicas(tmp_path) as here:
        names = [f"adapter {number}" for number in range(24)]
        for _ in range(3):
            await asyncio.gather(*(here.run(name) for name in names))
        assert all(len(shards) == 1 for shards in here.where.values())
        per_shard = Counter(next(iter(shards)) for shards in here.where.values())
        assert len(per_shard) == 3 and max(per_shard.values()) <= 16
        # Only that shard was sent a prefetch before.
        for index, shard in enumerate(here.shards):
            prefetched = {pin.id for command in shard.commands for pin in command.prefetches}
            assert prefetched == {name for name, shards in here.where.items() if index in shards}


async def test_requests_of_the_base_model_go_to_the_least_loaded_shard(tmp_path: Path) -> None:
    async with replicas(tmp_path) as here:
        for shard in here.shards:
            shard.answer = lambda submit: Script([7], hangs=True)
        running = [here.submit(num_tokens=50) for _ in range(30)]
        await here.shards[0].until(lambda: sum(shard.num_running for shard in here.shards) == 30)
        assert [shard.num_running for shard in here.shards] == [10, 10, 10]
        assert here.dispatcher.num_active == 30
        for generation in running:
            generation.cancel()
        await here.shards[0].until(lambda: sum(shard.num_running for shard in here.shards) == 0)


async def test_a_resident_adapter_takes_precedence_over_the_hash(tmp_path: Path) -> None:
    async with replicas(tmp_path) as here:
        await here.run("a")
        (home,) = here.where["a"]
        other = (home + 1) % 3
        digest = here.shards[home].submits[0].adapter.digest
        here.shards[other].tell(pb.AdapterState(digest=digest, residency=pb.AdapterState.RESIDENT))
        await here.shards[0].until(lambda: here.dispatcher.links[other].residency.is_resident(digest))
        await here.run("a")
        assert here.where["a"] == {home: 1, other: 1}


async def test_an_adapter_of_a_full_shard_overflows_to_an_idle_one(tmp_path: Path) -> None:
    async with replicas(tmp_path, 2, room=8) as here:
        for shard in here.shards:
            shard.answer = lambda submit: Script([7], hangs=True)
        running = [here.submit("a", 50) for _ in range(24)]
        await here.shards[0].until(lambda: sum(shard.num_running for shard in here.shards) == 12)
        # The other one takes half as many: then it has enough load of its own.
        assert sorted(here.where["a"].values()) == [4, 8]
        for generation in running:
            generation.cancel()
        await here.shards[0].until(lambda: sum(shard.num_running for shard in here.shards) == 0)


async def test_a_prompt_goes_to_the_shard_with_its_prefix(tmp_path: Path) -> None:
    async with replicas(tmp_path) as here:
        stems = [[number] * 64 for number in range(9)]
        for turn in range(4):
            await asyncio.gather(*(whole(here.ask([*stem, *[99] * turn * 40])) for stem in stems))
        shards = [[index for index in range(3) if here.num_prompts(index, stem)] for stem in stems]
        assert all(len(where) == 1 for where in shards), shards
        assert Counter(where[0] for where in shards) == {0: 3, 1: 3, 2: 3}
        assert here.reasons == {"least_loaded": 9, "prefix_cached": 27}


async def test_prefixes_of_other_salts_are_ignored(tmp_path: Path) -> None:
    async with replicas(tmp_path, 2) as here:
        for salt in ("a", "b", "a", ""):
            await whole(here.ask([1] * 64, cache_salt=salt))
        assert here.reasons == {"least_loaded": 3, "prefix_cached": 1}


async def test_a_popular_prefix_overflows_to_other_shards(tmp_path: Path) -> None:
    """Requests with a common prefix neither wait for their shard nor leave the others idle."""
    async with replicas(tmp_path, 2, room=8) as here:
        for shard in here.shards:
            shard.answer = lambda submit: Script([7], hangs=True)
        running = [here.ask([1] * 64, 50)]
        await here.shards[0].until(lambda: sum(shard.num_running for shard in here.shards) == 1)
        running += [here.ask([1] * 64, 50) for _ in range(20)]
        await here.shards[0].until(lambda: [shard.num_running for shard in here.shards] == [8, 8])
        assert here.reasons["overflow"] > 0
        for generation in running:
            generation.cancel()
        await here.shards[0].until(lambda: sum(shard.num_running for shard in here.shards) == 0)


async def test_a_hot_adapter_overflows_to_an_idle_shard(tmp_path: Path) -> None:
    async with replicas(tmp_path, 2) as here:
        for shard in here.shards:
            shard.answer = lambda submit: Script([7], hangs=True)
        running = [here.submit("a", 50) for _ in range(30)]
        await here.shards[0].until(lambda: sum(shard.num_running for shard in here.shards) == 30)
        assert min(here.where["a"].values()) == 10
        assert here.reasons == {"adapter_affinity": 20, "overflow": 10}
        for generation in running:
            generation.cancel()
        await here.shards[0].until(lambda: sum(shard.num_running for shard in here.shards) == 0)


async def test_a_lost_shard_affects_only_its_own_requests(tmp_path: Path) -> None:
    async with replicas(tmp_path, 2) as here:
        for shard in here.shards:
            shard.answer = lambda submit: Script([7], hangs=True)
        running = [here.submit(num_tokens=50) for _ in range(4)]
        await here.shards[0].until(lambda: [shard.num_running for shard in here.shards] == [2, 2])
        await here.shards[0]._server.stop(grace=0)
        await here.shards[1].until(lambda: not here.dispatcher.links[0].ready)
        assert here.dispatcher.ready and here.dispatcher.num_active == 4

        await here.shards[1].until(lambda: here.shards[1].num_running == 4)
        here.shards[1].answer = lambda submit: Script([7] * submit.max_new_tokens)
        for generation in running:
            generation.cancel()
        await asyncio.gather(*(here.run(f"adapter {number}") for number in range(8)))


async def test_a_new_loader_gets_the_holds(tmp_path: Path) -> None:
    async with replicas(tmp_path, 1) as here:
        admission = here.dispatcher.admission
        assert admission is not None
        adapters = {name: Adapter(name, (Pin(SourceKind.LOCAL, name, "1"),)) for name in "ab"}
        digests = {name: (await admission.content(adapter)).digest for name, adapter in adapters.items()}
        for name, adapter in adapters.items():
            admission.pin(digests[name], adapter)
        admission.unpin(digests["b"])
        await here.shards[0].until(lambda: any("release" in call for call in here.loader.calls))
        here.loader.calls.clear()
        here.loader.hang_up()
        await here.shards[0].until(lambda: bool(here.loader.calls))
        assert [call.get("hold") for call in here.loader.calls] == [digests["a"]]


async def test_pins_go_to_the_adapter_s_own_shard_and_unload_to_all(tmp_path: Path) -> None:
    async with replicas(tmp_path) as here:
        admission = here.dispatcher.admission
        assert admission is not None
        adapter = Adapter("a", (Pin(SourceKind.LOCAL, "a", "1"),))
        content = await admission.content(adapter)
        admission.pin(content.digest, adapter)
        await here.shards[0].until(lambda: any(shard.commands for shard in here.shards))
        pinned = [index for index, shard in enumerate(here.shards) if any(command.pins for command in shard.commands)]
        await here.run("a")
        assert [*here.where["a"]] == pinned
        task = asyncio.create_task(admission.unload(content.digest))
        await here.shards[0].until(
            lambda: all(any(command.unload_digests for command in shard.commands) for shard in here.shards)
        )
        for shard in here.shards:
            assert not task.done()
            shard.tell(pb.AdapterState(digest=content.digest, residency=pb.AdapterState.ABSENT))
            await asyncio.sleep(0.02)
        await task


async def test_a_shard_that_was_replaced_loads_the_most_used_adapters_one_by_one(tmp_path: Path) -> None:
    async with replicas(tmp_path, 1) as here:
        (shard,), (link,) = here.shards, here.dispatcher.links
        for name, count in {"a": 1, "b": 3, "c": 2, "unloaded": 4}.items():
            for _ in range(count):
                await here.run(name)
        unloaded = shard.submits[-1].adapter.digest
        assert here.dispatcher.admission is not None
        unloading = asyncio.create_task(here.dispatcher.admission.unload(unloaded))
        await shard.until(lambda: any(command.unload_digests for command in shard.commands))
        shard.tell(pb.AdapterState(digest=unloaded, residency=pb.AdapterState.ABSENT))
        await unloading
        await shard.__aexit__()
        await shard.until(lambda: not link.ready)
        shard.commands.clear()
        await shard.__aenter__()
        await shard.until(lambda: link.ready)

        def loaded() -> list[str]:
            return [pin.id for command in shard.commands for pin in command.prefetches]

        for names in (["b"], ["b", "c"], ["b", "c", "a"]):
            await shard.until(lambda names=names: loaded() == names)  # type: ignore[misc]
            await asyncio.sleep(0.05)
            assert loaded() == names
            digest = [pin.digest for command in shard.commands for pin in command.prefetches][-1]
            shard.tell(pb.AdapterState(digest=digest, residency=pb.AdapterState.RESIDENT))


async def test_a_new_shard_loads_no_more_adapters_than_it_has_slots(tmp_path: Path) -> None:
    async with replicas(tmp_path, 1) as here:
        (link,) = here.dispatcher.links
        for number in range(20):
            await here.run(f"adapter {number}")
        admission = here.dispatcher.admission
        assert admission is not None and link.info is not None
        admission.on_connect(link)
        assert len(admission._prefetch_queues[link.index]) == link.info.adapter_slots == 16
