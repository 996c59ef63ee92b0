"""Sums of adapters that requests name with weights of their own, against the adapters that PEFT merges."""

import random
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.adapters.loader.worker import WorkerContext, WorkerJobs
from lorikeet.proto.params import NO_SPECULATION, Method, Speculation
from lorikeet.router.adapters.loading import loaded
from lorikeet.router.requests.request import Loaded, Merging, composition_of, digest_of
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.requests.request import Request
from lorikeet.shard.scheduler.adapter_slots import AdapterSlots
from tests import tiny
from tests.shard.engine import adapter_exactness
from tests.shard.engine.adapter_exactness import Text, Tried
from tests.shard.engine.exactness import NEW_TOKENS, prompts_of

Parts = dict[str, float]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "small": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "mlp": peft.LoraConfig(r=4, lora_alpha=2, target_modules=["v_proj", "up_proj", "down_proj"]),
    "root": peft.LoraConfig(r=4, lora_alpha=3, target_modules=LINEARS, use_rslora=True),
    "wide": peft.LoraConfig(r=20, lora_alpha=20, target_modules=LINEARS),
    "ends": peft.LoraConfig(r=5, lora_alpha=10, target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "dora": peft.LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"], use_dora=True),
    "patterns": peft.LoraConfig(r=4, lora_alpha=4, target_modules=LINEARS, alpha_pattern={"q_proj": 9}),
}
SUMS: list[tuple[str, Parts]] = [
    ("cat", {"small": 0.5, "wide": -1.25}),
    ("linear", {"small": 0.5, "mlp": 0.75, "root": -0.5}),
    ("cat", {"ends": 0.8, "mlp": 1.0, "wide": 0.3}),
    ("linear", {"mlp": 2.0}),
    ("cat", {"patterns": 1.0, "small": 0.0}),
    ("linear", {"small": 0.25, "mlp": 0.75}),
    ("linear", {"small": 0.75, "mlp": 0.25}),
]


class World:
    """A base and its adapters, as the loader brings them into the served layout."""

    def __init__(self, folder: Path, configs: dict[str, peft.LoraConfig]) -> None:
        warnings.filterwarnings("ignore", category=peft.utils.warning.PeftWarning)
        self.folder = folder
        self.base = tiny.make("llama", folder / "base", seed=3)
        self.adapters = adapter_exactness.make_adapters(self.base, folder / "adapters", configs, seed=1)
        loader = LoaderConfig(socket="", model_path=str(self.base), adapter_store=str(self.store), dtype="float32")
        jobs = WorkerJobs(WorkerContext(loader))
        try:
            entries = {name: jobs.convert({"folder": str(path)})["entry"] for name, path in self.adapters.items()}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.loaded: dict[str, Loaded] = {name: loaded({**entry, "tier": "disk"}) for name, entry in entries.items()}

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def config(self, num_slots: int) -> ShardConfig:
        return ShardConfig(
            "llama", str(self.base), "unix:/dev/null", device="cpu", dtype="float32", max_total_tokens=128,
            step_tokens=40, adapter_store=str(self.store), max_active_adapters=num_slots,
        )  # fmt: skip

    def request(
        self, prompt: list[int], strategy: str, parts: Parts, speculation: Speculation = NO_SPECULATION
    ) -> Request:
        """A request for a sum; for one adapter where there is no strategy."""
        request = Request((1, 0), list(prompt), len(prompt), NEW_TOKENS, speculation=speculation)
        if not strategy:
            return replace_all(request, adapter_digest=self.loaded[next(iter(parts))].digest)
        merging = Merging(tuple(parts.values()), strategy, None, "total")
        composition = composition_of(merging, [self.loaded[name] for name in parts])
        assert composition is not None
        return replace_all(request, adapter_digest=digest_of(composition), composition=composition)

    def by_peft(self, prompt: list[int], strategy: str, parts: Parts) -> Text:
        """PEFT's own greedy text with the adapter that it merges."""
        first, *others = parts
        base = adapter_exactness.load_plain(self.base)
        model: Any = peft.PeftModel.from_pretrained(base, str(self.adapters[first]), first)
        for name in others:
            model.load_adapter(str(self.adapters[name]), name)
        if strategy:
            model.add_weighted_adapter(list(parts), list(parts.values()), "merged", combination_type=strategy)
        model.set_adapter("merged" if strategy else first)
        ids = torch.tensor([prompt])
        output = model.eval().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return Text(output.sequences[0, len(prompt) :].tolist(), torch.stack(output.logits, 1)[0].float())


def replace_all(request: Request, **fields: Any) -> Request:
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def numbered(requests: Sequence[Request]) -> list[Request]:
    return [replace_all(request, key=(1, index)) for index, request in enumerate(requests)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("sums"), CONFIGS)


@pytest.mark.parametrize("num_slots", [7, 3], ids=["all in slots", "fewer slots than adapters"])
def test_sums_in_one_batch_equal_what_peft_merges(world: World, num_slots: int) -> None:
    cases = [*SUMS, ("", {"wide": 1.0}), ("", {"dora": 1.0})]
    prompts = prompts_of("llama", tuple(5 + 3 * index for index in range(len(cases))))
    drafts = [NO_SPECULATION, Speculation(Method.LOOKUP, 4)]
    requests = [
        world.request(prompt, *case, drafts[index % 2])
        for index, (prompt, case) in enumerate(zip(prompts, cases, strict=True))
    ]
    given = adapter_exactness.outputs_of(world.config(num_slots), numbered(requests))
    wanted = [world.by_peft(prompt, *case) for prompt, case in zip(prompts, cases, strict=True)]
    assert len({tuple(text.token_ids) for text in wanted}) == len(cases)
    tried = Tried("llama", num_slots)
    names = [f"{strategy} {parts}" for strategy, parts in cases]
    adapter_exactness.compare(tried, wanted, [output.token_ids for output in given], names)
    assert not tried.differences, tried


@pytest.mark.parametrize(
    ("strategy", "names"),
    [("cat", ["dora", "small"]), ("ties", ["small", "mlp"]), ("linear", ["small", "wide"]), ("linear", ["patterns"]),
     ("cat", ["wide"] * 17)],
)  # fmt: skip
def test_what_shards_cannot_add_is_merged_into_a_file(world: World, strategy: str, names: list[str]) -> None:
    merging = Merging((1.0,) * len(names), strategy, 0.5, "total")
    assert composition_of(merging, [world.loaded[name] for name in names]) is None


def run_pairs(
    folder: Path, num_adapters: int, num_pairs: int, num_compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with random weights of random pairs of adapters, which are loaded once and never leave."""
    configs = {
        f"adapter-{index}": peft.LoraConfig(r=4, lora_alpha=4 + index % 5, target_modules=["q_proj", "v_proj"])
        for index in range(num_adapters)
    }
    world = World(folder, configs)
    loads: list[str] = []
    take = AdapterSlots.loaded
    monkeypatch.setattr(
        AdapterSlots, "loaded", lambda self, digest, content: (loads.append(digest), take(self, digest, content))
    )
    monkeypatch.setattr(AdapterSlots, "_leave_slot", lambda *_: pytest.fail("an adapter was evicted"))
    generator = random.Random(7)
    cases: list[tuple[str, Parts]] = []
    for index in range(num_pairs):
        names = [f"adapter-{number}" for number in generator.sample(range(num_adapters), 2)]
        cases.append((("cat", "linear")[index % 2], {name: generator.uniform(-2, 2) for name in names}))
    prompts = prompts_of("llama", tuple(2 + index % 7 for index in range(num_pairs)))
    speculation = Speculation(Method.LOOKUP, 3)
    requests = [world.request(prompt, *case, speculation) for prompt, case in zip(prompts, cases, strict=True)]
    given = adapter_exactness.outputs_of(world.config(num_adapters), numbered(requests))
    assert len(loads) == len(set(loads)) == len({name for _, parts in cases for name in parts})
    every = range(0, num_pairs, num_pairs // num_compared)
    wanted = [world.by_peft(prompts[index], *cases[index]) for index in every]
    tried = Tried("llama", num_adapters)
    adapter_exactness.compare(
        tried, wanted, [given[index].token_ids for index in every], [str(cases[index]) for index in every]
    )
    assert not tried.differences, tried


def test_pairs_of_weights_load_nothing_after_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_pairs(tmp_path, num_adapters=10, num_pairs=60, num_compared=10, monkeypatch=monkeypatch)


@pytest.mark.long
def test_a_thousand_pairs_of_weights_over_fifty_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_pairs(tmp_path, num_adapters=50, num_pairs=1000, num_compared=1000, monkeypatch=monkeypatch)
