"""A decoder layer as one call gives the very bits of its parts, and is left out where a layer does anything else."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaModel

from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.fusion.compiled import CompiledLayers
from lorikeet.shard.model.fusion.kernels import CpuKernels
from lorikeet.shard.model.fusion.layer import FusedDecoderLayer
from lorikeet.shard.model.fusion.parts import FusedNorm, fuse_norm
from lorikeet.shard.model.kernels import cpu as kernels
from lorikeet.shard.model.lora.targets import LoraTarget, SlotWeights
from tests import tiny
from tests.shard.model.lora.layout import packed

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C compiler")

SHAPE = {"hidden_size": 128, "head_dim": 32}


def load(kind: str, folder: Path, **more: Any) -> Model:
    tiny.make(kind, folder, **SHAPE, **more)
    model = load_model(ShardConfig("tiny", str(folder), "unix:/dev/null", dtype="bfloat16", attention="cpu"))
    for number, module in enumerate(model.network.modules()):
        if isinstance(module, FusedNorm):  # a tiny model's norms are all alike
            module.weight.copy_(torch.linspace(0.5, 1.0 + number / 100, module.weight.shape[0]))
    model.allocate_kv(12)
    return model


def fused_layers(model: Model) -> list[FusedDecoderLayer]:
    return [module for module in model.network.modules() if isinstance(module, FusedDecoderLayer)]


def steps_of(model: Model) -> list[list[Segment]]:
    """Prompts of several lengths, then one token each with a fresh prompt among them, then one token alone."""
    pages = [range(3), range(3, 4), range(4, 8)]
    prompts = [Segment(0, 70, pages[0]), Segment(0, 1, pages[1])]
    mixed = [Segment(70, 1, pages[0]), Segment(1, 1, pages[1]), Segment(0, 97, pages[2])]
    return [prompts, mixed, [Segment(97, 1, pages[2])]]


def logits_of(model: Model, segments: list[Segment]) -> torch.Tensor:
    num_tokens = sum(segment.num_tokens for segment in segments)
    ids = torch.arange(5, 5 + num_tokens) * 7 % model.info.vocab_size
    model.inputs.fill(segments, ids, torch.arange(num_tokens))
    return model.forward().clone()


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("mistral", {"sliding_window": 40}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma2", {}),
        ("gemma3_text", {"sliding_window": 40}),
    ],
)
def test_one_call_gives_the_bits_of_the_parts(
    kind: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(kind, tmp_path, **more)
    assert len(fused_layers(model)) == model.info.num_layers
    whole = [logits_of(model, segments) for segments in steps_of(model)]

    model.allocate_kv(12)

    def by_parts(layer: FusedDecoderLayer, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return layer.one_by_one(hidden_states, **options)

    model.compiled = None
    monkeypatch.setattr(FusedDecoderLayer, "forward", by_parts)
    for one_call, segments in zip(whole, steps_of(model), strict=True):
        assert torch.equal(one_call, logits_of(model, segments))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_all_layers_in_one_call_give_the_bits_of_the_network(kind: str, tmp_path: Path) -> None:
    model = load(kind, tmp_path)
    assert model.compiled is not None
    in_one_call = [logits_of(model, segments) for segments in steps_of(model)]
    model.compiled = None
    model.allocate_kv(12)
    for logits, segments in zip(in_one_call, steps_of(model), strict=True):
        assert torch.equal(logits, logits_of(model, segments))


def put_adapters(model: Model, num_slots: int) -> None:
    """A different adapter in each slot; the last one changes the up products alone."""
    model.allocate_adapters(num_slots)
    generator = torch.Generator().manual_seed(num_slots)
    for name, target in model.lora_targets.items():
        assert isinstance(target, LoraTarget)
        for slot in range(num_slots):
            if slot == num_slots - 1 and not name.endswith("up_proj"):
                continue
            shapes = [(4 + 4 * slot, target.num_in), (4 + 4 * slot, target.num_out)]
            a, b = (torch.randn(shape, generator=generator).bfloat16() / 8 for shape in shapes)
            target.put(slot, packed(SlotWeights(a, b)))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_adapters_give_the_same_bits_in_all_layers_in_one_call(kind: str, tmp_path: Path) -> None:
    model = load(kind, tmp_path)
    compiled, actual = model.compiled, {}
    assert compiled is not None
    for num_slots in (2, 3):  # the tables of slots are new
        put_adapters(model, num_slots)
        pages = [range(i, i + 1) for i in range(4)]
        segments = [Segment(0, 3 + i, pages[i], slot=i - 1 if i <= num_slots else -1) for i in range(4)]
        for network in (compiled, None):
            model.compiled = network
            actual[network] = logits_of(model, segments)
        assert torch.equal(actual[compiled], actual[None])
        bare = logits_of(model, [replace(segment, slot=-1) for segment in segments])
        ends = [3, 7, 12, 18]
        rows = [slice(start, end) for start, end in pairwise([0, *ends])]
        differs = [not torch.equal(actual[compiled][row], bare[row]) for row in rows]
        assert differs == [segment.slot >= 0 for segment in segments]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_token_alone_is_one_row(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the bits that it has next to others."""
    model = load(kind, tmp_path)
    assert model.compiled is not None
    segments = [Segment(0, 1, range(1)), Segment(0, 1, range(1, 2))]
    both = logits_of(model, segments)
    counts, plain = [], CompiledLayers.__call__

    def counted(self: CompiledLayers, hidden_states: torch.Tensor, angles: Any) -> Any:
        counts.append(hidden_states.shape[1])
        return plain(self, hidden_states, angles)

    monkeypatch.setattr(CompiledLayers, "__call__", counted)
    assert torch.equal(logits_of(model, segments[:1])[:1], both[:1])
    assert counts == [1]


def test_a_part_of_a_prompt_has_no_logits(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    assert model.compiled is not None
    model.inputs.fill([Segment(0, 3, range(1))], torch.arange(3), torch.arange(0))
    assert model.forward().shape == (0, model.info.vocab_size)


def test_a_model_with_code_of_its_own_around_its_layers_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaModel.forward

    def scaled(*arguments: Any, **options: Any) -> Any:
        made = plain(*arguments, **options)
        made.last_hidden_state = made.last_hidden_state * 2
        return made

    monkeypatch.setattr(LlamaModel, "forward", scaled)
    with structlog.testing.capture_logs() as logs:
        assert load("llama", tmp_path).compiled is None
    assert "layers_computed_one_by_one" in [entry["event"] for entry in logs]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_compiled_layers_that_differ_from_their_parts_are_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CompiledLayers.__call__

    def off_by_a_little(self: CompiledLayers, hidden_states: torch.Tensor, angles: Any) -> Any:
        output = plain(self, hidden_states, angles)
        return output if output is None else output * (1 + 2**-7)

    monkeypatch.setattr(CompiledLayers, "__call__", off_by_a_little)
    with structlog.testing.capture_logs() as logs:
        model = load(name, tmp_path)
    assert "layers_computed_one_by_one" in [entry["event"] for entry in logs]
    assert model.compiled is None and all(layer.calls_parts for layer in fused_layers(model))


def test_new_pages_are_used_once_they_are_allocated(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    first = logits_of(model, steps_of(model)[0])
    model.allocate_kv(20)
    assert torch.equal(first, logits_of(model, steps_of(model)[0]))


def test_logits_that_are_capped_are_not_compiled_with_the_layers(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        model = load("gemma2", tmp_path)
    assert model.compiled is None and not any(layer.calls_parts for layer in fused_layers(model))
    assert "layers_computed_one_by_one" not in [entry["event"] for entry in logs]


@pytest.mark.parametrize("kind", ["granite", "olmo2", "cohere"])
def test_layers_that_do_more_or_less_are_left_alone(kind: str, tmp_path: Path) -> None:
    assert not fused_layers(load(kind, tmp_path))


@pytest.mark.parametrize("width", [64, 4096])
def test_a_layer_norm_is_no_rms_norm_however_wide(width: int) -> None:
    assert fuse_norm(CohereLayerNorm(width).bfloat16(), CpuKernels()) is None


def test_fusions_none_fuses_nothing(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path, **SHAPE)
    model = load_model(ShardConfig("tiny", str(tmp_path), "unix:/dev/null", dtype="bfloat16", fusions="none"))
    assert not any(isinstance(module, FusedNorm | FusedDecoderLayer) for module in model.network.modules())
