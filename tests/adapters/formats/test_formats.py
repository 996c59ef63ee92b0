"""Adapters saved by PEFT give PEFT's logits in the served layout, for every base and every setting."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorikeet.adapters.formats import layout
from lorikeet.adapters.formats.changes import ModuleChange
from lorikeet.adapters.formats.configuration import SERVED_KINDS
from tests import tiny
from tests.adapters import making

BASES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "bloom",
    "opt",
    "gpt_neox",
    "mixtral",
)
WITH_BIASES = ("qwen2", "gpt2", "bloom", "opt", "gpt_neox")


class Base:
    """One tiny model, what reads adapters for it, and what it computes alone."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = tiny.make(name, folder)
        self.reader, self.facts = making.make_reader(self.folder)
        model = making.load_base(self.folder)
        self.logits = making.logits(model)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
        self.leaves = sorted({name.rpartition(".")[2] for name, module in named if module is not head})
        self.head = next(name for name, module in model.named_modules() if module is head)
        self.embedding = next(name for name, module in model.named_modules() if module is embedding)

    def check(self, adapter: Path) -> None:
        """What PEFT computes is what the layout computes, and another thing than the base."""
        expected = making.of_peft(self.folder, adapter)
        served_layout = making.of_layout(self.folder, making.lay_out(self.reader, self.facts, adapter))
        assert (expected - self.logits).abs().mean() > 1e-3
        torch.testing.assert_close(served_layout, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Base] = {}

    def base(name: str) -> Base:
        if name not in made:
            made[name] = Base(name, tmp_path_factory.mktemp(name))
        return made[name]

    return base


def settings(base: Base) -> dict[str, dict[str, Any]]:
    first, last = base.leaves[0], base.leaves[-1]
    return {
        "all linear": {"target_modules": "all-linear"},
        "a list": {"target_modules": [first, last], "r": 3},
        "a pattern": {"target_modules": rf".*\.1\..*({first}|{last})"},
        "rank-stabilised": {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 5},
        "ranks and scalings by pattern": {
            "target_modules": [first, last],
            "rank_pattern": {first: 5, rf"2\..*{last}": 7},
            "alpha_pattern": {last: 3},
        },
        "some layers": {"target_modules": [first, last], "layers_to_transform": [0, 2]},
        "without some": {"target_modules": "all-linear", "exclude_modules": [first]},
        "without a pattern": {"target_modules": [first, last], "exclude_modules": rf".*\.0\..*{first}"},
        "magnitudes": {"target_modules": base.leaves, "use_dora": True},
        "the embedding": {"target_modules": [base.embedding.rpartition(".")[2], first]},
        "the head": {"target_modules": [base.head, first]},
        "biases of B": {"target_modules": [first, last], "lora_bias": True},
    }


NAMES = (
    "all linear", "a list", "a pattern", "rank-stabilised", "ranks and scalings by pattern", "some layers",
    "without some", "without a pattern", "magnitudes", "the embedding", "the head", "biases of B",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(name, setting, marks=() if (row + column) % 9 == 0 else pytest.mark.long)
        for row, name in enumerate(BASES)
        for column, setting in enumerate(NAMES)
    ],
)
def test_a_setting_computes_what_peft_computes(name: str, setting: str, bases: Any, tmp_path: Path) -> None:
    base = bases(name)
    config = LoraConfig(**{"r": 8, "lora_alpha": 12, "task_type": "CAUSAL_LM", **settings(base)[setting]})
    base.check(making.make_adapter(base.folder, tmp_path / "adapter", config))


@pytest.mark.parametrize("rank", [1, 512])
def test_the_smallest_and_the_largest_rank(rank: int, bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "down_proj"])
    base.check(making.make_adapter(base.folder, tmp_path / "adapter", config))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("name", WITH_BIASES)
def test_trained_biases_are_added(name: str, bias: Any, bases: Any, tmp_path: Path) -> None:
    base = bases(name)
    config = LoraConfig(r=4, target_modules=base.leaves[:1], bias=bias)
    adapter = making.make_adapter(base.folder, tmp_path / "adapter", config)
    base.check(adapter)
    served = making.lay_out(base.reader, base.facts, adapter)
    assert bias != "all" or any(module["rank"] == 0 for module in served.modules.values())


def test_a_tied_head_is_adapted_without_the_embedding(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "base", tie_word_embeddings=True)
    reader, facts = making.make_reader(folder)
    adapter = making.make_adapter(folder, tmp_path / "adapter", LoraConfig(r=4, target_modules=["lm_head", "q_proj"]))
    served = making.lay_out(reader, facts, adapter)
    assert "lm_head" in served.modules and "model.embed_tokens" not in served.modules
    torch.testing.assert_close(making.of_layout(folder, served), making.of_peft(folder, adapter), rtol=1e-4, atol=1e-4)


def test_saved_modules_replace_the_bases(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    adapter = making.make_adapter(base.folder, tmp_path / "adapter", config)
    base.check(adapter)
    served = making.lay_out(base.reader, base.facts, adapter)
    kinds = {name: served.modules[name]["kind"] for name in ("lm_head", "model.embed_tokens")}
    assert kinds == {"lm_head": "linear", "model.embed_tokens": "embedding"}


def test_saved_embeddings_equal_to_the_bases_are_left_out(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    config = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])
    adapter = making.make_adapter(base.folder, tmp_path / "adapter", config)
    assert any("base_layer" in key for key in load_file(adapter / "adapter_model.safetensors"))
    assert making.lay_out(base.reader, base.facts, adapter).modules["model.embed_tokens"] == {
        "kind": "embedding",
        "rank": 4,
    }


def test_experts_by_parameter(bases: Any, tmp_path: Path) -> None:
    base = bases("mixtral")
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    adapter = making.make_adapter(base.folder, tmp_path / "adapter", config)
    base.check(adapter)
    served = making.lay_out(base.reader, base.facts, adapter)
    assert served.tensors["model.layers.0.mlp.experts.gate_up_proj.A"].shape == (4, 4, 64)
    assert served.tensors["model.layers.0.mlp.experts.down_proj.B"].shape == (4, 64, 4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("is_old", [True, False])
def test_the_router_of_experts(name: str, is_old: bool, bases: Any, tmp_path: Path) -> None:
    """As a parameter, and as the linear layer that it was in older versions, which `all-linear` included."""
    base = bases(name)
    adapter = tmp_path / "adapter"
    if is_old:
        torch.manual_seed(6)
        num_experts, block = {"mixtral": (4, "block_sparse_moe"), "qwen3_moe": (5, "mlp")}[name]
        layers = {"mixtral": (0, 1, 2), "qwen3_moe": (0, 2)}[name]
        tensors = {}
        for number in layers:
            key = f"base_model.model.model.layers.{number}.{block}.gate"
            tensors[f"{key}.lora_A.weight"] = torch.randn(4, 64) / 8
            tensors[f"{key}.lora_B.weight"] = torch.randn(num_experts, 4)
        LoraConfig(r=4, lora_alpha=6, target_modules=["gate"]).save_pretrained(str(adapter))
        save_file(tensors, adapter / "adapter_model.safetensors")
    else:
        config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
        making.make_adapter(base.folder, adapter, config)
    base.check(adapter)
    served = making.lay_out(base.reader, base.facts, adapter)
    assert served.modules["model.layers.0.mlp.gate"] == {"kind": "router", "rank": 4}
    assert "router" in SERVED_KINDS


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_as_separate_modules_of_older_versions(name: str, bases: Any, tmp_path: Path) -> None:
    base = bases(name)
    torch.manual_seed(5)
    old = {
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
        "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    }
    block, leaves = old[name]
    inner, layers, experts = {"mixtral": (96, (0, 1, 2), 4), "qwen3_moe": (48, (0, 2), 5)}[name]
    tensors = {}
    for layer in layers:
        for expert in range(experts):
            for leaf in leaves:
                key = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{leaf}"
                num_in, num_out = (inner, 64) if leaf == leaves[2] else (64, inner)
                tensors[f"{key}.lora_A.weight"] = torch.randn(4, num_in) * num_in**-0.5
                tensors[f"{key}.lora_B.weight"] = torch.randn(num_out, 4) * 0.3
    adapter = tmp_path / "adapter"
    LoraConfig(r=4, lora_alpha=6, target_modules=list(leaves)).save_pretrained(str(adapter))
    save_file(tensors, adapter / "adapter_model.safetensors")
    base.check(adapter)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_bin_file_is_read_as_safetensors_are(parts: int, bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    adapter = making.make_adapter(base.folder, tmp_path / "adapter", LoraConfig(r=4, target_modules=["q_proj"]))
    expected = making.lay_out(base.reader, base.facts, adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    if parts == 1:
        torch.save(tensors, adapter / "adapter_model.bin")
    else:
        split(tensors, parts, adapter)
    served_layout = making.lay_out(base.reader, base.facts, adapter)
    assert served_layout.modules == expected.modules
    assert all(torch.equal(served_layout.tensors[name], tensor) for name, tensor in expected.tensors.items())


def split(tensors: dict[str, torch.Tensor], parts: int, folder: Path) -> None:
    """Save as parts with an index."""
    names = [f"adapter_model-{number:05}-of-{parts:05}.safetensors" for number in range(1, parts + 1)]
    places = {key: names[number % parts] for number, key in enumerate(tensors)}
    for name in names:
        save_file({key: tensors[key] for key, place in places.items() if place == name}, folder / name)
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_the_second_adapter_of_equal_shapes_is_read_without_peft(
    bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bases("llama")
    reader, facts = making.make_reader(base.folder)
    first, second = (
        making.make_adapter(base.folder, tmp_path / str(seed), LoraConfig(r=4, target_modules="all-linear"), seed)
        for seed in (1, 2)
    )
    making.lay_out(reader, facts, first)
    monkeypatch.setattr("lorikeet.adapters.formats.changes.read", None)
    served = making.lay_out(reader, facts, second)
    torch.testing.assert_close(
        making.of_layout(base.folder, served), making.of_peft(base.folder, second), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layout_is_cast_once_to_the_bases_dtype(dtype: torch.dtype, bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    adapter = making.make_adapter(
        base.folder, tmp_path / "adapter", LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj"])
    )
    exact = making.lay_out(base.reader, base.facts, adapter)
    served_layout = making.lay_out(base.reader, replace(base.facts, dtype=dtype), adapter)
    for name, tensor in exact.tensors.items():
        assert torch.equal(served_layout.tensors[name], tensor.to(dtype))


def test_the_written_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "odd.bias": torch.randn(3),
        "a.A": torch.randn(5, 7).bfloat16(),
        "a.B": torch.randn(3, 5).half(),
        "none.A": torch.zeros(0, 4).bfloat16(),
        "one.magnitude": torch.randn(1),
    }
    made = layout.ServedLayout(tensors, {"a": {"kind": "linear", "rank": 5}}, {"count": 2, "version": 2, "layers": 1})
    facts = layout.Base("b" * 64, "w" * 64, torch.bfloat16, frozenset(), values=None)  # type: ignore[arg-type]
    with (tmp_path / "ours").open("wb") as file:
        layout.served_file(made, "d" * 64, facts).write(file)
    served_layout = load_file(tmp_path / "ours")
    assert served_layout.keys() == tensors.keys()
    assert all(torch.equal(served_layout[name], tensor) for name, tensor in tensors.items())
    assert all(served_layout[name].dtype == tensor.dtype for name, tensor in tensors.items())
    with safe_open(tmp_path / "ours", "pt") as file:
        metadata = file.metadata()
    assert (metadata["rank"], json.loads(metadata["heads"])["count"]) == (str(made.rank), made.num_heads)
    save_file(tensors, tmp_path / "theirs", metadata=metadata)
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("ours", "theirs"))
    num_values = sum(tensor.nbytes for tensor in tensors.values())
    assert ours[-num_values:] == theirs[-num_values:], "the same order"


@pytest.mark.parametrize("of_file", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_base", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scaled_factors_are_rounded_once(of_file: torch.dtype, of_base: torch.dtype) -> None:
    a, b = torch.randn(8, 96).to(of_file), torch.randn(160, 8).to(of_file)
    facts = layout.Base("b" * 64, "w" * 64, of_base, SERVED_KINDS, values=None)  # type: ignore[arg-type]
    change = ModuleChange("m", "linear", 8, scaling=16 / 3, a=a, b=b)
    tensors = layout.lay_out(layout.decide([change], facts), facts).tensors
    assert torch.equal(tensors["m.A"], a.to(of_base))
    assert torch.equal(tensors["m.B"], (b.float() * (16 / 3)).to(of_base))
