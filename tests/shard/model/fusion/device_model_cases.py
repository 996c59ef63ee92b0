"""Whole tiny models with the fused modules for devices against the same models without: run by test_cuda_parts.py in a
process of its own, on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

import copy
import gc
import weakref
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from triton.runtime.interpreter import GridExecutor

from lorikeet.shard import attention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import layers, load_model
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.fusion.attention import FusedAttention
from lorikeet.shard.model.fusion.kernels import FusedMatrix
from lorikeet.shard.model.fusion.layer import FusedDecoderLayer
from lorikeet.shard.model.fusion.parts import FusedMlp, FusedNorm
from lorikeet.shard.model.fusion.select import choose
from lorikeet.shard.model.fusion.verify import AttentionRecorder
from lorikeet.shard.model.kernels import triton as device_kernels
from lorikeet.shard.model.lora.targets import LoraTarget
from lorikeet.shard.model.model import Model
from lorikeet.shard.model.moe.experts import NAME as EXPERTS
from lorikeet.shard.model.tensor_parallel.group import Group
from tests import tiny
from tests.shard.model.fusion.device_cases import DEVICE
from tests.shard.model.lora.layout import packed
from tests.shard.model.lora.triton_cases import MIXES, NUM_SLOTS, Bench
from tests.shard.near import worst_share
from tests.shard.ranks_in_threads import together

ONE = {"num_hidden_layers": 1}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ALL = (FusedNorm, FusedAttention, FusedMlp, FusedDecoderLayer)
MODELS: dict[str, tuple[str, dict[str, Any], tuple[type, ...]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}, ALL),
    "llama biases": ("llama", {**ONE, "attention_bias": True, "mlp_bias": True}, ALL),
    "tied": ("llama", {**ONE, "tie_word_embeddings": True}, ALL),
    "mistral": ("mistral", ONE, ALL),
    "qwen2": ("qwen2", ONE, ALL),
    "qwen3": ("qwen3", ONE, ALL),
    "gemma2": ("gemma2", {**ONE, "layer_types": ["sliding_attention"]}, ALL),
    "phi3": ("phi3", ONE, ALL),
    "phi3 partial": ("phi3", {**ONE, "rope_parameters": PARTIAL}, ALL),
    "mixtral": ("mixtral", ONE, (FusedNorm, FusedAttention, FusedDecoderLayer)),
    "granite": ("granite", ONE, ALL[:3]),  # what is added is multiplied first
    "stablelm": ("stablelm", ONE, (FusedAttention, FusedMlp)),  # layer norms with biases
    "gpt2": ("gpt2", {"n_layer": 1}, ()),
}

ROUNDED = ("llama biases", "qwen3", "gemma2")


def network_of(name: str, dtype: torch.dtype, **more: Any) -> Any:
    """A random model whose norms are unlike each other."""
    torch.manual_seed(tiny.SEEDS.get(name, 0))
    config = tiny.config_of(name, **more)
    scaled = AutoModelForCausalLM.from_config(config)
    tiny.scale(scaled)
    network: Any = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=NAME, experts_implementation=EXPERTS
    )
    network.load_state_dict(scaled.state_dict())
    for key, parameter in network.named_parameters():
        if "norm" in key:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return network.requires_grad_(False).eval().to(DEVICE, dtype)


def assembled(network: Any, fusions: str, group: Group | None = None) -> Model:
    inputs = StepInputs(16, DEVICE)
    backend = attention.create("reference", DEVICE, network.dtype, 16)
    model = assemble(network, network.config, backend, network.dtype, inputs, 128, group, fusions=fusions)
    model.allocate_kv(12)
    return model


def logits_of(model: Model, segments: list[Segment]) -> torch.Tensor:
    num_tokens = sum(segment.num_tokens for segment in segments)
    ids = (torch.arange(5, 5 + num_tokens) * 7 % model.info.vocab_size).to(DEVICE)
    rows = torch.arange(num_tokens)
    model.inputs.fill(segments, ids, rows.to(DEVICE), rows.tolist())
    return model.forward().clone()


def check(expected: torch.Tensor, got: torch.Tensor, dtype: torch.dtype) -> None:
    assert worst_share(got, expected) <= (1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in MODELS),
        *((name, torch.bfloat16) for name in ("llama biases", "qwen3", "gemma2")),
    ],
    ids=str,
)
def test_a_whole_model_gives_the_same_logits(name: str, dtype: torch.dtype) -> None:
    kind, more, expected = MODELS[name]
    network = network_of(kind, dtype, **more)
    plain, fused = assembled(copy.deepcopy(network), "none"), assembled(network, "device")
    actual = {type(module) for module in fused.network.modules()}
    assert actual & set(ALL) == set(expected)
    layers = [module for module in fused.network.modules() if isinstance(module, FusedDecoderLayer)]
    assert len(layers) == (fused.info.num_layers if FusedDecoderLayer in expected else 0)
    for segments in (
        [Segment(0, 4, [3]), Segment(0, 1, [1])],
        [Segment(4, 1, [3]), Segment(1, 2, [1])],
    ):
        check(logits_of(plain, segments), logits_of(fused, segments), dtype)


@pytest.mark.parametrize(("kind", "num_alone"), [("llama", 1), ("gemma2", 5)])
def test_sums_are_part_of_the_norms_that_follow(kind: str, num_alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"layer_types": ["full_attention"] * 2} if kind == "gemma2" else {}
    model = assembled(network_of(kind, torch.float32, num_hidden_layers=2, **kinds), "device")
    called: list[str] = []

    def noting(name: str) -> Any:
        kernel = getattr(device_kernels, name)
        return lambda *values: called.append(name) or kernel(*values)

    for name in ("rms_norm", "add_rms_norm"):
        monkeypatch.setattr(device_kernels, name, noting(name))
    logits_of(model, [Segment(0, 2, [1])])
    assert called.count("add_rms_norm") == 4 and called.count("rms_norm") == num_alone


@pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks are threads, which take turns in the interpreter")
@pytest.mark.parametrize(("kind", "is_attention_fused"), [("llama", True), ("qwen3", True), ("phi3", False)])
def test_a_rank_s_part_is_fused(kind: str, is_attention_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not where every rank needs the whole output of q, k and v."""
    lock, launch = Lock(), GridExecutor.__call__

    def in_turn(executor: Any, *values: Any, **named: Any) -> Any:
        with lock:
            return launch(executor, *values, **named)

    monkeypatch.setattr(GridExecutor, "__call__", in_turn)
    monkeypatch.setattr(layers, "can_pack", lambda dtype: False)
    network = network_of(kind, torch.float32, num_hidden_layers=2)
    segments = [Segment(0, 4, [3]), Segment(0, 1, [1])]
    expected = logits_of(assembled(copy.deepcopy(network), "none"), segments)
    parts = [copy.deepcopy(network) for _ in range(2)]
    models = together([partial(assembled, part, "device") for part in parts])
    for model in models:
        count = sum(isinstance(module, FusedAttention) for module in model.network.modules())
        assert count == 2 * is_attention_fused
        assert sum(isinstance(module, FusedNorm) for module in model.network.modules()) >= 5
    for actual in together([lambda _, model=model: logits_of(model, segments) for model in models]):  # type: ignore[misc]
        check(expected, actual, torch.float32)


def test_no_weight_is_held_twice() -> None:
    network = network_of("llama", torch.float32, **ONE)
    expected = sum(parameter.numel() for parameter in network.parameters())
    layer = network.model.layers[0]
    layer.self_attn.lorikeet_binding = AttentionRecorder()
    parts = (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj)
    dropped = [weakref.ref(part.weight) for part in parts]
    del layer, parts
    fusion = choose("device", network, DEVICE, torch.float32, set())
    assert fusion is not None
    fusion.place(network)
    fused = [module for module in network.modules() if isinstance(module, FusedMlp | FusedAttention)]
    matrices = [module.ups[0] if isinstance(module, FusedMlp) else module.qkv for module in fused]
    assert len(fused) == 2
    gc.collect()
    assert [weight() for weight in dropped] == [None] * len(dropped)
    kept = sum(parameter.numel() for parameter in network.parameters())
    assert kept + sum(matrix.weight.numel() for matrix in matrices if isinstance(matrix, FusedMatrix)) == expected


@pytest.mark.parametrize("kind", ["llama", "phi3"])
@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_of_adapters_gives_the_same_logits(mix: str, kind: str) -> None:
    plain, fused = with_adapters(kind)
    segments = segments_of([slot if slot in (-1, 7, 8) else slot % 4 for slot in MIXES[mix][:5]])
    expected = logits_of(plain, segments)
    check(expected, logits_of(fused, segments), torch.float32)
    assert torch.equal(expected, logits_of(plain, segments_of([-1] * 5))) == (mix == "none")


@cache
def with_adapters(kind: str) -> tuple[Model, Model]:
    """A model without fused modules and with them: adapters of several ranks, with DoRA's scale, with biases."""
    network = network_of(kind, torch.float32, num_hidden_layers=1)
    models = assembled(copy.deepcopy(network), "none"), assembled(network, "device")
    for model in models:
        bench = Bench(torch.float32, targets_of(model), inputs=model.inputs)
        bench.load(0, 1, 2, 3, 7, 8)
        if DEVICE.type == "cpu":
            compute_compiled(bench)
    return models


def test_adapters_of_fused_products_take_one_launch() -> None:
    network = network_of("llama", torch.float32, num_hidden_layers=1)
    plain, fused = assembled(copy.deepcopy(network), "none"), assembled(network, "device")
    benches = [Bench(torch.float32, targets_of(model), inputs=model.inputs) for model in (plain, fused)]
    for bench in benches:
        bench.load(0, 1)
    if DEVICE.type == "cpu":
        compute_compiled(benches[0])
    segments = segments_of([1, -1, 0], (2, 1, 1))
    check(logits_of(plain, segments), logits_of(fused, segments), torch.float32)
    assert sorted(len(key) for key in benches[1].kernels._parts) == [1, 1, 2, 3]


def compute_compiled(bench: Bench) -> None:
    """Let compiled code compute the adapters of a bench: the interpreter takes its time."""
    for target in bench.targets:
        target.kernels = None
        for slot in range(NUM_SLOTS):
            weights = bench.plain.get((slot, target.name))
            target.put(slot, None if weights is None else packed(weights, target.is_embedding))


def segments_of(slots: list[int], counts: tuple[int, ...] = (3, 1, 2, 1, 1)) -> list[Segment]:
    return [Segment(0, count, [page], slot) for page, (slot, count) in enumerate(zip(slots, counts, strict=True))]


def targets_of(model: Model) -> list[LoraTarget]:
    """Adapter targets of the layers' products."""
    model.allocate_adapters(NUM_SLOTS)
    return [target for name, target in model.lora_targets.items() if "_proj" in name and isinstance(target, LoraTarget)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
def test_targets_project_by_their_part_of_a_fused_weight(kind: str) -> None:
    network = network_of(kind, torch.float32, num_hidden_layers=1)
    plain, fused = assembled(copy.deepcopy(network), "none"), assembled(network, "device")
    for one, other in zip(targets_of(plain), targets_of(fused), strict=True):
        x = torch.randn(3, one.num_in).to(DEVICE)
        assert one.project is not None and other.project is not None and one.name == other.name
        torch.testing.assert_close(one.project(x), other.project(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.squared_norms, other.squared_norms)


def test_unknown_fusions_are_rejected() -> None:
    with pytest.raises(ValueError, match="unknown fusions 'all'"):
        assembled(network_of("llama", torch.float32), "all")


def test_a_loaded_model_has_the_fused_modules_of_its_configuration(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path, num_hidden_layers=1)
    config = ShardConfig("tiny", str(tmp_path), "unix:/dev/null", device=str(DEVICE), attention="reference")
    for fusions, count in (("device", 1), ("none", 0)):
        model = load_model(replace(config, fusions=fusions))
        assert sum(isinstance(module, FusedDecoderLayer) for module in model.network.modules()) == count
