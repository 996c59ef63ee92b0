"""Activated LoRA (aLoRA): each request gets what PEFT's `generate` gives it alone, wherever the activation is in chunks
and pages, and pages before it are the base model's.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest

from lorikeet.router.requests.adapter_content import last_occurrence
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.inbox import Commands, Inbox, StreamOpened
from lorikeet.shard.grpc.outbox import Outbox, Output
from lorikeet.shard.model import load_model
from lorikeet.shard.scheduler.request import Request
from lorikeet.shard.scheduler.speculation.types import NO_SPECULATION, Method, Speculation
from lorikeet.shard.startup.build import build_engine
from tests import tiny
from tests.shard.engine import adapter_exactness
from tests.shard.engine.adapter_exactness import LLAMA, TARGETS, Text, Tried, compare, lay_out, make_adapters, oracle
from tests.shard.engine.exactness import NEW_TOKENS, prompts_of

INVOCATION = [7, 9, 7]
PAGE = 4
SMALL_PAGES: dict[str, Any] = {"page_size": PAGE, "attention": "reference"}
FURTHER = ("qwen3", "gpt2", "mistral", "gemma2", "phi3")


@dataclass
class Scene:
    """A tiny model with two activated adapters and a plain one."""

    name: str
    base: Path
    store: Path
    adapters: dict[str, Path]
    digests: dict[str, str]

    def prompts(self) -> list[tuple[str, list[int]]]:
        """Adapters and prompts: without an activation, with one at every offset of a page, and with two."""
        words = [[token + 10 for token in each] for each in prompts_of(self.name, (8, 9, 10, 11, 13, 6, 12))]
        found = [("one", words[0] + INVOCATION + words[5][:at]) for at in range(3)]
        found += [("two", words[at] + INVOCATION + [50, 51]) for at in range(5)]
        found += [("one", words[6]), ("two", INVOCATION + words[4])]
        found += [("one", words[5] + INVOCATION + words[1] + INVOCATION + [60]), ("plain", words[0] + INVOCATION)]
        return [*found, ("", words[0] + INVOCATION), ("two", words[0] + INVOCATION)]

    def expected(self, prompts: Sequence[tuple[str, list[int]]]) -> list[Text]:
        return oracle(self.base, self.adapters, [name for name, _ in prompts], [ids for _, ids in prompts])

    def run(
        self, prompts: Sequence[tuple[str, list[int]]], speculation: Speculation = NO_SPECULATION, **settings: Any
    ) -> list[Output]:
        """All requests at once."""
        config = ShardConfig(
            self.name, str(self.base), "unix:/dev/null", dtype="float32", max_total_tokens=128, threads=1,
            adapter_store=str(self.store), max_active_adapters=4, history_memory=0, **{**SMALL_PAGES, **settings},
        )  # fmt: skip
        inbox, outbox = Inbox(), Outbox()
        engine = build_engine(config, load_model(config), inbox, outbox)
        outbox.open(1, wake=lambda: None)
        inbox.put(StreamOpened(1))
        requests = []
        for number, (name, ids) in enumerate(prompts):
            request = Request((1, number), list(ids), len(ids), NEW_TOKENS, speculation=speculation)
            start = last_occurrence(ids, INVOCATION) if name in ("one", "two") else 0
            if name and start >= 0:
                request.adapter_digest, request.adapter_start = self.digests[name], start
            requests.append(request)
        inbox.put(Commands(1, submits=list(requests)))
        outputs: dict[int, Output] = {}
        while not all(each.finish_reason for each in outputs.values()) or len(outputs) < len(prompts):
            engine.step()
            if not engine.scheduler.running:
                inbox.wait(0.05)
            for output in outbox.take(1).outputs:
                assert not output.error, output.error
                earlier = outputs.setdefault(output.key[1], output)
                if earlier is not output:
                    earlier.merge(output)
        engine.scheduler.check()
        return [outputs[number] for number in range(len(prompts))]


def make(name: str, folder: Path) -> Scene:
    warnings.filterwarnings("ignore", category=peft.utils.warning.PeftWarning)
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
    attention, mlp = TARGETS.get(name, LLAMA)
    common: dict[str, Any] = {"fan_in_fan_out": True} if name == "gpt2" else {}
    activated: dict[str, Any] = {**common, "alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM"}
    configs = {
        "one": peft.LoraConfig(r=4, lora_alpha=8, target_modules=attention, **activated),
        "two": peft.LoraConfig(r=8, lora_alpha=8, target_modules=[*attention, *mlp], use_rslora=True, **activated),
        "plain": peft.LoraConfig(r=4, lora_alpha=8, target_modules=attention, **common),
    }
    base = tiny.make(name, folder / "base", seed=tiny.SEEDS.get(name, 0))
    adapters = make_adapters(base, folder / "adapters", configs, seed=1)
    return Scene(name, base, folder / "store", adapters, lay_out(base, folder / "store", adapters))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make("llama", tmp_path_factory.mktemp("alora"))


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 7": {"step_tokens": 7},
    "lag 1, few pages": {"commit_lag": 1, "num_pages": 40, "step_tokens": 11},
    "compiled attention, lookup": {
        "speculation": Speculation(Method.LOOKUP, 4),
        "page_size": None,
        "attention": "auto",
        "step_tokens": 19,
    },
}


@pytest.fixture(scope="module")
def expected(scene: Scene) -> list[Text]:
    return scene.expected(scene.prompts())


def differences(scene: Scene, expected: list[Text], outputs: list[Output]) -> list[str]:
    tried = Tried(scene.name, 4)
    compare(tried, expected, [output.token_ids for output in outputs], [name for name, _ in scene.prompts()])
    return tried.differences


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_request_gets_what_peft_gives_it_alone(
    scene: Scene, expected: list[Text], settings: dict[str, Any]
) -> None:
    assert differences(scene, expected, scene.run(scene.prompts(), **settings)) == []


def test_the_adapters_change_texts_only_where_they_are_activated(scene: Scene, expected: list[Text]) -> None:
    prompts = scene.prompts()
    bare = oracle(scene.base, {}, [""] * len(prompts), [ids for _, ids in prompts])
    for (name, ids), text, own in zip(prompts, expected, bare, strict=True):
        is_active = name == "plain" or (name != "" and last_occurrence(ids, INVOCATION) >= 0)
        assert (text.token_ids != own.token_ids) == is_active


@pytest.mark.long
@pytest.mark.parametrize("name", FURTHER)
def test_further_architectures(name: str, tmp_path: Path) -> None:
    other = make(name, tmp_path)
    outputs = other.run(other.prompts(), step_tokens=7, speculation=Speculation(Method.LOOKUP, 4))
    assert differences(other, other.expected(other.prompts()), outputs) == []


def test_the_base_model_s_pages_are_shared_up_to_the_activation(scene: Scene) -> None:
    """A base turn, then two adapters on the same prompt: what was computed is found by both, and not beyond."""
    prompt = [token + 10 for token in prompts_of("llama", (41,))[0]]
    for size in range(PAGE):
        ids = prompt[: 33 + size]
        asked = [("", ids), ("one", ids + INVOCATION), ("two", ids + INVOCATION), ("plain", ids + INVOCATION)]
        outputs = scene.run(asked, max_running=1)
        full = (33 + size) // PAGE * PAGE
        assert [output.num_cached for output in outputs] == [0, full, full, 0]


def test_an_activated_adapter_is_kept_apart_by_its_position() -> None:
    assert adapter_exactness.NEW_TOKENS  # the texts above are long enough to cross pages
    assert last_occurrence([1, 7, 9, 7, 9, 7], INVOCATION) == 3
    assert last_occurrence([7, 9], INVOCATION) == last_occurrence([], INVOCATION) == -1
