"""Activated LoRA (aLoRA): each request gets what PEFT's `generate` gives it alone, wherever the activation is in chunks
and pages, and pages before it are the base model's.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoConfig

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import MedusaShape
from lorikeet.proto.params import NO_SPECULATION, Method, Speculation
from lorikeet.router.requests.request import last_occurrence
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.engine.engine import Engine
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, Output, StreamOpened
from lorikeet.shard.model import load_model
from lorikeet.shard.requests.request import Request
from lorikeet.shard.startup.build import build_engine
from lorikeet.shard.startup.draft_model import load_draft_model
from tests import tiny
from tests.adapters.medusa import small
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
        words = [without_invocation(each) for each in prompts_of(self.name, (8, 9, 10, 11, 13, 6, 12))]
        found = [("one", words[0] + INVOCATION + words[5][:at]) for at in range(3)]
        found += [("two", words[at] + INVOCATION + [50, 51]) for at in range(5)]
        found += [("one", words[6]), ("two", INVOCATION + words[4])]
        found += [("one", words[5] + INVOCATION + words[1] + INVOCATION + [60]), ("plain", words[0] + INVOCATION)]
        return [*found, ("", words[0] + INVOCATION), ("two", words[0] + INVOCATION)]

    def expected(self, prompts: Sequence[tuple[str, list[int]]]) -> list[Text]:
        return oracle(self.base, self.adapters, [name for name, _ in prompts], [ids for _, ids in prompts])

    def run(
        self,
        prompts: Sequence[tuple[str, list[int]]],
        speculation: Speculation = NO_SPECULATION,
        emitted: Sequence[list[int]] = (),
        after_step: Callable[[Engine], None] = lambda engine: None,
        num_runs: int = 1,
        **settings: Any,
    ) -> list[Output]:
        """The outputs of all requests at once, in the last of several runs. `emitted`: tokens of each that an earlier
        shard had emitted.
        """
        config = ShardConfig(
            self.name, str(self.base), "unix:/dev/null", dtype="float32", max_total_tokens=128, threads=1,
            adapter_store=str(self.store), max_active_adapters=4, history_memory=0, **{**SMALL_PAGES, **settings},
        )  # fmt: skip
        inbox, outbox = Inbox(), Outbox()
        model = load_model(config)
        engine = build_engine(config, model, inbox, outbox, load_draft_model(config, model))
        outbox.open(1, wake=lambda: None)
        inbox.put(StreamOpened(1))
        outputs: dict[int, Output] = {}
        for _ in range(num_runs):
            outputs.clear()
            inbox.put(Commands(1, submits=list[Any](self._requests(prompts, speculation, emitted))))
            while not all(each.finish_reason for each in outputs.values()) or len(outputs) < len(prompts):
                engine.step()
                after_step(engine)
                if not engine.scheduler.running:
                    inbox.wait(0.05)
                for output in outbox.take(1).request_outputs():
                    assert not output.error, output.error
                    earlier = outputs.setdefault(output.key[1], output)
                    if earlier is not output:
                        earlier.merge(output)
            engine.scheduler.check()
        return [outputs[number] for number in range(len(prompts))]

    def _requests(
        self, prompts: Sequence[tuple[str, list[int]]], speculation: Speculation, emitted: Sequence[list[int]]
    ) -> list[Request]:
        requests = []
        for number, (name, ids) in enumerate(prompts):
            known = [*ids, *(emitted[number] if emitted else [])]
            request = Request((1, number), known, len(ids), NEW_TOKENS, speculation=speculation)
            start = last_occurrence(ids, INVOCATION) if name in ("one", "two") else 0
            if name and start >= 0:
                request.adapter_digest, request.adapter_start = self.digests[name], start
            if speculation.method is Method.MEDUSA:
                request.heads_digest = self.digests["heads"]
            requests.append(request)
        return requests


def without_invocation(token_ids: Sequence[int]) -> list[int]:
    """Other tokens of the vocabulary in place of small ids, which an invocation has."""
    return [10 + token % (tiny.VOCAB - 10) for token in token_ids]


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
    hidden_size = AutoConfig.from_pretrained(base).get_text_config().hidden_size
    files.write(folder / "heads", small.heads(MedusaShape(3, 1, hidden_size), scale=0.01))
    digests = lay_out(base, folder / "store", {**adapters, "heads": folder / "heads"})
    return Scene(name, base, folder / "store", adapters, digests)


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


def differences(
    scene: Scene, expected: list[Text], outputs: list[Output], emitted: Sequence[list[int]] = ()
) -> list[str]:
    tried = Tried(scene.name, 4)
    before = emitted or [[] for _ in outputs]
    found = [[*known, *output.token_ids] for known, output in zip(before, outputs, strict=True)]
    compare(tried, expected, found, [name for name, _ in scene.prompts()])
    return tried.differences


SOURCES: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "lookup": {"speculation": Speculation(Method.LOOKUP, 4)},
    "heads": {"speculation": Speculation(Method.MEDUSA, 0, 3)},
    "draft model": {"speculation": Speculation(Method.DRAFT, 3)},
}
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 7": {"step_tokens": 7},
    "preempted": {"num_pages": 32, "step_tokens": 24},
    "prefix hits": {"num_runs": 2},
    "lag 1": {"commit_lag": 1, "step_tokens": 64},
}


def check_pair(scene: Scene, expected: list[Text], source: str, way: str, num_emitted: int) -> None:
    """A draft source and a way to run, on requests of which an earlier shard has emitted some tokens."""
    settings = {**SOURCES[source], **WAYS[way]}
    if source == "draft model":
        draft = tiny.make(scene.name, scene.base.parent / "draft", seed=3, num_hidden_layers=1)
        settings |= {"draft_model": str(draft), "draft_model_id": "draft", "draft_dtype": "float32"}
    emitted = [text.token_ids[:num_emitted] for text in expected]
    preempted: list[int] = []
    outputs = scene.run(
        scene.prompts(),
        emitted=emitted,
        after_step=lambda engine: preempted.append(engine.scheduler.num_preempted),
        **settings,
    )
    assert differences(scene, expected, outputs, emitted) == []
    assert way != "preempted" or preempted[-1] > 0
    assert way != "prefix hits" or sum(output.num_cached for output in outputs) > 0
    is_busy = source == "draft model" and way == "chunks of 7"  # with prompts, which it has to take in
    assert is_busy or source in ("no drafts", "lookup") or sum(sum(output.num_drafted) for output in outputs) > 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=() if name != "lag 1, few pages" else pytest.mark.long)
        for name, settings in SETTINGS.items()
    ],
)
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


@pytest.mark.parametrize(
    ("source", "way", "num_emitted"),
    [pytest.param("heads", "preempted", 0, marks=pytest.mark.long), ("draft model", "lag 1", 5)],
)
def test_draft_sources_and_ways_to_run(
    scene: Scene, expected: list[Text], source: str, way: str, num_emitted: int
) -> None:
    check_pair(scene, expected, source, way, num_emitted)


@pytest.mark.long
@pytest.mark.parametrize("num_emitted", [0, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_pair_of_them(scene: Scene, expected: list[Text], source: str, way: str, num_emitted: int) -> None:
    check_pair(scene, expected, source, way, num_emitted)


def test_pages_before_the_activation_are_held_once(scene: Scene) -> None:
    """Three requests on one conversation: each adapter holds no more pages of its own than its part needs."""
    ids = without_invocation(prompts_of("llama", (41,))[0])
    asked = [("", ids), ("one", ids + INVOCATION), ("two", ids + INVOCATION)]
    held: list[dict[str, set[int]]] = []

    def note(engine: Engine) -> None:
        if len(engine.scheduler.running) == len(asked):
            held.append({asked[each.key[1]][0]: set(each.page_ids) for each in engine.scheduler.running})

    scene.run(asked, after_step=note, num_runs=2)  # in the second run all of them find the conversation's pages
    shared = len(ids) // PAGE
    most = -(-(len(INVOCATION) + NEW_TOKENS) // PAGE) + 1
    for pages in held[-NEW_TOKENS // 2 :]:
        assert len(pages["one"] & pages["two"] & pages[""]) == shared
        for name, other in (("one", "two"), ("two", "one")):
            assert len(pages[name] - pages[other] - pages[""]) <= most
    assert held


@pytest.mark.long
@pytest.mark.parametrize("name", FURTHER)
def test_further_architectures(name: str, tmp_path: Path) -> None:
    other = make(name, tmp_path)
    outputs = other.run(other.prompts(), step_tokens=7, speculation=Speculation(Method.LOOKUP, 4))
    assert differences(other, other.expected(other.prompts()), outputs) == []


def test_the_base_model_s_pages_are_shared_up_to_the_activation(scene: Scene) -> None:
    """A base turn, then two adapters on the same prompt: what was computed is found by both, and not beyond."""
    prompt = without_invocation(prompts_of("llama", (41,))[0])
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
