"""A model split over ranks, here threads, against the whole one, for every architecture that has a plan."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from lorikeet.shard import attention
from lorikeet.shard.adapters.manager import CollectiveReader, prepare
from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.loader import load_network, read_config, reject_unservable
from lorikeet.shard.model.lora.memory import Arena
from lorikeet.shard.model.medusa.heads import read_heads
from lorikeet.shard.model.model import Model
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.model.tensor_parallel.partitioning import plan_of
from tests import tiny
from tests.adapters.medusa import small
from tests.shard.engine.adapter_exactness import lay_out, make_adapters
from tests.shard.model.medusa.test_heads import SHAPES, run, write
from tests.shard.near import worst_share
from tests.shard.ranks_in_threads import together

SPLIT = (
    "llama", "llama3_rope", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox",
    "starcoder2", "granite", "olmo2", "mixtral",
)  # fmt: skip
SAMPLE = ("llama", "gemma2", "phi", "gpt_neox", "mixtral")
COUNTS = (9, 1, 23)
NUM_PAGES = 12


def config_of(folder: Path) -> ShardConfig:
    return ShardConfig("tiny", str(folder), "unix:/dev/null", dtype="float32", max_total_tokens=128)


def networks(config: ShardConfig, count: int) -> list[nn.Module]:
    outputs = []
    for _ in range(count):
        checkpoint = read_config(config)
        reject_unservable(checkpoint)
        outputs.append(load_network(config, checkpoint, torch.float32))
    return outputs


def assembled(config: ShardConfig, network: Any, group: Group | None = None) -> Model:
    cpu = torch.device("cpu")
    backend = attention.create("auto", cpu, torch.float32, None)
    inputs = StepInputs(backend.page_size, cpu)
    text_config = network.config.get_text_config()
    return assemble(network, text_config, backend, torch.float32, inputs, config.max_total_tokens, group)


def logits(model: Model) -> torch.Tensor:
    """Logits of every token of three requests, then of one more token each."""
    outputs = []
    model.allocate_kv(NUM_PAGES)
    starts, counts = [0] * len(COUNTS), list(COUNTS)
    for _ in range(2):
        segments = [
            Segment(start, count, range(4 * index, 4 * index + 4))
            for index, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
        ids = torch.randint(0, tiny.VOCAB, (sum(counts),), generator=torch.Generator().manual_seed(7))
        model.inputs.fill(segments, ids, torch.arange(len(ids)))
        outputs.append(model.forward())
        starts, counts = [start + count for start, count in zip(starts, counts, strict=True)], [1] * len(COUNTS)
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.long) for name in SPLIT]
)
def test_split_over_two_it_computes_the_same(name: str, tmp_path: Path) -> None:
    config = config_of(tiny.make(name, tmp_path))
    whole, *parts = networks(config, 3)
    expected = logits(assembled(config, whole))
    models = together([partial(assembled, config, part) for part in parts])
    outputs = together([lambda _, model=model: logits(model) for model in models])  # type: ignore[misc]
    for output in outputs:
        assert worst_share(output, expected) <= 1e-4
    assert sum(model.page_bytes for model in models) <= 2 * assembled(config, networks(config, 1)[0]).page_bytes


@pytest.mark.parametrize("overrides", [{"vocab_size": 321}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_odd_vocabularies_tied_heads_and_biases_are_split_too(overrides: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tiny.make("llama", tmp_path, **overrides))
    whole, *parts = networks(config, 3)
    for network in (whole, *parts):
        with torch.no_grad():
            torch.manual_seed(3)
            for name, parameter in network.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
    expected = logits(assembled(config, whole))
    models = together([partial(assembled, config, part) for part in parts])
    for output in together([lambda _, model=model: logits(model) for model in models]):  # type: ignore[misc]
        assert worst_share(output, expected) <= 1e-4
    if "tie_word_embeddings" in overrides:
        for model in models:
            head, embedding = model.network.get_submodule("lm_head"), model.network.get_submodule("model.embed_tokens")
            memory = embedding.weight.untyped_storage().data_ptr()  # type: ignore[union-attr, operator]
            assert head.matrix.weight.untyped_storage().data_ptr() == memory  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_split_as_the_output_head_is(shape: str, tmp_path: Path) -> None:
    config = config_of(tiny.make("llama", tmp_path / "model"))
    whole, *parts = networks(config, 3)
    file = write(tmp_path / "heads.served", small.heads(SHAPES[shape]))
    wanted_heads = [HeadsRow(0, 0, 2), HeadsRow(2, 0, 1)]

    def drafts(model: Model) -> torch.Tensor:
        content = read_heads(file, model.heads, Arena(1 << 24), torch.float32, is_for_device=False)
        assert content is not None and content.packed is not None
        model.heads.put(0, content.packed)
        model.allocate_kv(NUM_PAGES)
        return run(model, [5, 10, 7], wanted_heads)

    one = assembled(config, whole)
    expected = drafts(one)
    models = together([partial(assembled, config, part) for part in parts])
    for output in together([lambda _, model=model: drafts(model) for model in models]):  # type: ignore[misc]
        assert worst_share(output, expected) <= 1e-4


def test_an_adapter_that_is_activated_within_a_chunk_computes_the_same(tmp_path: Path) -> None:
    """Activated LoRA: from the first token on, at every offset of a chunk, behind it, and not at all."""
    base = tiny.make("llama", tmp_path / "model")
    config = config_of(base)
    whole, *parts = networks(config, 3)
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", alora_invocation_tokens=[7], task_type="CAUSAL_LM")
    folders = make_adapters(base, tmp_path / "adapters", {"activated": adapter}, seed=1)
    path = tmp_path / "store" / f"{lay_out(base, tmp_path / 'store', folders)['activated']}.safetensors"
    starts = (0, 1, 4, 5, 9)
    segments = [Segment(0, 5, range(2 * n, 2 * n + 2), slot=0, slot_start=at) for n, at in enumerate(starts)]
    later = [replace(segment, start=5, num_tokens=4) for segment in segments]
    ids = torch.randint(0, tiny.VOCAB, (50,), generator=torch.Generator().manual_seed(3))

    def found(model: Model, slot: int, group: Group) -> torch.Tensor:
        """[T, V] of all segments, in two chunks."""
        device, files, _ = prepare(config, model, 1, 1 << 24, group.add_up if group.size > 1 else None)
        device.put(0, CollectiveReader(files, group).read(path))
        model.allocate_kv(2 * len(starts))
        rows = []
        for chunk in (segments, later):
            taken = sum(segment.num_tokens for segment in chunk)
            model.inputs.fill([replace(segment, slot=slot) for segment in chunk], ids[:taken], torch.arange(taken))
            rows.append(model.forward().clone())
        return torch.cat(rows)

    (expected,) = together([partial(found, assembled(config, whole), 0)])
    models = together([partial(assembled, config, part) for part in parts])
    for output in together([partial(found, model, 0) for model in models]):
        assert worst_share(output, expected) <= 1e-4
    bare = together([partial(found, model, -1) for model in models])[0]
    differs = (bare - expected).abs().amax(1) > 1e-3
    first = [[at >= start for at in range(5)] for start in starts]
    second = [[at >= start for at in range(5, 9)] for start in starts]
    assert differs.tolist() == [is_different for row in (*first, *second) for is_different in row]


def test_each_rank_holds_its_part_alone(tmp_path: Path) -> None:
    config = config_of(tiny.make("llama", tmp_path))
    whole, *parts = networks(config, 3)
    one = assembled(config, whole)
    models = together([partial(assembled, config, part) for part in parts])
    assert [model.page_bytes for model in models] == [one.page_bytes // 2] * 2
    for name, target in one.lora_targets.items():
        for model in models:
            own = model.lora_targets[name]
            assert own.partition is None or own.num_in * own.num_out * 2 == target.num_in * target.num_out


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("gpt2", 2, "cannot split gpt2: transformers has no tensor parallel plan for it"),
        ("llama", 4, "cannot split llama over 4 ranks: its num_key_value_heads are 2"),
        ("gemma", 2, "cannot split gemma over 2 ranks: its num_key_value_heads are 1"),
    ],
)
def test_unsupported_splits_are_rejected_with_a_reason(name: str, size: int, reason: str, tmp_path: Path) -> None:
    config = config_of(tiny.make(name, tmp_path))
    with pytest.raises(ValueError, match=reason):
        together([partial(assembled, config, part) for part in networks(config, size)])


def test_a_plan_names_the_layers_and_the_output_head(tmp_path: Path) -> None:
    (network,) = networks(config_of(tiny.make("llama", tmp_path)), 1)
    plan = plan_of(network)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["lm_head"].startswith("colwise")
