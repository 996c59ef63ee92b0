"""Shards that join and leave while a router serves."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import SamplingParams
from lorikeet.proto.version import version
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.errors import NoShard
from lorikeet.router.requests.request import GenerationRequest
from lorikeet.router.shards import members
from lorikeet.router.shards.members import addresses_of, incompatibility
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router import simulated_shard
from tests.router.simulated_shard import SimulatedModel
from tests.router.text.vocabularies import byte_level

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for lies in several places
            await asyncio.sleep(0.005)


async def test_shards_of_a_file_join_and_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "POLL_SECONDS", 0.05)
    file = tmp_path / "shards.json"
    addresses = [f"unix:{tmp_path}/{name}.sock" for name in "ab"]
    tokenizer = Tokenizer(byte_level(), eos_ids=frozenset({1}))
    dispatcher = Dispatcher(RouterConfig("model", str(tmp_path), (f"file:{file}",)), tokenizer)
    await dispatcher.start()
    with pytest.raises(NoShard):
        dispatcher.submit(GenerationRequest([5], 2))
    started = []
    for number, address in enumerate(addresses, 1):
        started.append(await simulated_shard.start(address, SimulatedModel(token_ids=tuple(range(200, 240)))))
        file.write_text(json.dumps(addresses[:number]))
        await until(lambda number=number: sum(link.ready for link in dispatcher.links) == number)  # type: ignore[misc]
    running = [dispatcher.submit(GenerationRequest([5], 60, SamplingParams(seed=seed))) for seed in range(6)]
    await until(lambda: all(generation.num_generated for generation in running))
    file.write_text(json.dumps(addresses[1:]))
    await asyncio.sleep(0.2)
    assert [link.address for link in dispatcher.links] == addresses  # it still serves
    started[0][2].cancel()
    await started[0][0].stop(0)
    await until(lambda: [link.address for link in dispatcher.links] == addresses[1:])
    for generation in running:
        assert len([token.id async for chunk in generation for token in chunk.tokens]) <= 60
        assert generation.num_generated == 60
    await dispatcher.stop()
    for server, _, steps in started[1:]:
        steps.cancel()
        await server.stop(0)
    tokenizer.close()


async def test_an_only_shard_may_return_with_another_model(tmp_path: Path) -> None:
    """As long as another shard is connected it must be compatible."""
    addresses = tuple(f"unix:{tmp_path}/{name}.sock" for name in "ab")
    tokenizer = Tokenizer(byte_level(), eos_ids=frozenset({1}))
    dispatcher = Dispatcher(RouterConfig("model", str(tmp_path), addresses), tokenizer)
    await dispatcher.start()
    for vocab_size in (8192, 4096):
        server, _, steps = await simulated_shard.start(addresses[0], SimulatedModel(vocab_size=vocab_size))
        await until(lambda: dispatcher.ready)
        assert dispatcher.links[0].info is not None and dispatcher.links[0].info.vocab_size == vocab_size
        other, _, other_steps = await simulated_shard.start(addresses[1], SimulatedModel(vocab_size=99))
        await asyncio.sleep(1.0)
        assert [link.ready for link in dispatcher.links] == [True, False]
        for service in (steps, other_steps):
            service.cancel()
        await asyncio.gather(server.stop(0), other.stop(0))
        await until(lambda: not dispatcher.ready)
    await dispatcher.stop()
    tokenizer.close()


async def test_addresses_of_sources(tmp_path: Path) -> None:
    assert await addresses_of("dns:localhost:9000") != {}
    assert set((await addresses_of("dns:localhost:9000")).values()) == {"localhost"}
    assert await addresses_of("dns:127.0.0.1:9000") == {"127.0.0.1:9000": "127.0.0.1"}
    assert await addresses_of("dns:[::1]:9000") == {"[::1]:9000": "::1"}
    assert await addresses_of("dns:nothing.invalid:9000") == {}
    assert await addresses_of(f"file:{tmp_path}/none.json") == {}
    for text in ("[", "5", '{"a": 1}', "[5]", "\\udc80"):
        (tmp_path / "broken.json").write_text(text)
        assert await addresses_of(f"file:{tmp_path}/broken.json") == {}
    assert await addresses_of(f"dns:{'a' * 70}.example:9000") == {}


def info(**values: object) -> pb.ShardInfo:
    fields = {
        "version": version(),
        "model_id": "m",
        "dtype": "float32",
        "vocab_size": 9,
        "max_total_tokens": 5,
        "rotary_factors": "short",
    } | values
    return pb.ShardInfo(**fields)  # type: ignore[arg-type]


async def test_adjacent_versions_are_compatible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.shards.members.version", lambda: "1.4.2")
    addresses = {
        text: incompatibility(info(version=text), None)
        for text in ("1.4.9", "1.3.0", "1.5.0", "1.2.9", "1.6", "2.4.2", "x")
    }
    assert [text for text, reason in addresses.items() if reason] == ["1.2.9", "1.6", "2.4.2", "x"]
    assert addresses["2.4.2"] == "the shard's version 2.4.2 and this router's, 1.4.2, don't fit together"


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "n"},
        {"dtype": "bfloat16"},
        {"vocab_size": 8},
        {"rotary_factors": "long"},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"num_ranks": 2},
    ],
)
async def test_a_shard_that_differs_from_the_others_is_incompatible(change: dict[str, object]) -> None:
    assert incompatibility(info(max_total_tokens=4), info()) == ""
    (name,) = change
    assert incompatibility(info(**change), info()).startswith(f"its {name} is {change[name]}")
