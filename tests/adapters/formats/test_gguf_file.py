"""A LoRA in llama.cpp's `.gguf` file is served as the adapter of PEFT that it was made of."""

import asyncio
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file

from lorikeet.adapters.check import AdapterValidator, Validation, read_headers
from lorikeet.adapters.errors import AdapterChanged, AdapterError, AdapterInvalid, NotServed
from lorikeet.adapters.formats import layout
from lorikeet.adapters.formats.configuration import Tokenizers
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.adapters.sources import base as sources
from lorikeet.adapters.sources.listed import LocalSource
from tests import tiny
from tests.adapters import making

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "linears": {"r": 4, "lora_alpha": 6, "target_modules": LINEARS},
    "ends": {"r": 3, "lora_alpha": 9, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "ranks": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 2}},
    "activated": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "alora_invocation_tokens": [5, 9],
        "task_type": "CAUSAL_LM",
    },
}


class World:
    def __init__(self, folder: Path, name: str = "llama") -> None:
        self.folder, self.base = folder, tiny.make(name, folder / "base", seed=2)
        self.reader, self.facts = making.make_reader(self.base)

    def served(self, folder: Path) -> layout.ServedLayout:
        with layout.open_adapter(folder, making.LIMIT, self.reader.skeleton) as opened:
            _, made = opened.lay_out(self.reader, self.facts)
            return replace(made, tensors={name: tensor.clone() for name, tensor in made.tensors.items()})

    def checked(self, folder: Path) -> Validation:
        source = LocalSource([folder.parent], making.LIMIT)
        pin = asyncio.run(source.resolve(Ref(SourceKind.LOCAL, folder.name), None)).pin
        headers = asyncio.run(read_headers(source, pin, None))
        return AdapterValidator(self.reader, Tokenizers(self.base), self.facts).validate(headers)

    @property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.base / "config.json").read_bytes()))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("gguf"))


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of a query or key as llama.cpp's converter orders them (`LlamaModel.permute`)."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write(adapter: Path, folder: Path, config: dict[str, Any], alpha: float | None = None, **changes: Any) -> Path:
    """As llama.cpp's `convert_lora_to_gguf.py` writes an adapter of PEFT for a Llama. Returns the new folder."""
    settings = json.loads((adapter / "adapter_config.json").read_bytes())
    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "adapter.gguf", changes.get("architecture", "llama"))
    writer.add_string("general.type", changes.get("kind", "adapter"))
    if "kind" not in changes:
        writer.add_string("adapter.type", "lora")
    metadata = {"adapter.lora.alpha": settings["lora_alpha"] if alpha is None else alpha}
    if ids := settings.get("alora_invocation_tokens"):
        metadata["adapter.alora.invocation_tokens"] = ids
    for key, value in {**metadata, **changes.get("metadata", {})}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_float32(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for key, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, dot, factor = key.removeprefix("base_model.model.").partition(".lora_")
        if not dot:
            continue  # the embedding that PEFT saves too
        is_a, values = "A" in factor, tensor.numpy()
        if module.endswith(("q_proj", "k_proj")) and not is_a:
            values = permuted(values, config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"])
        if module.endswith("embed_tokens") and is_a:
            values = np.ascontiguousarray(values.T)
        name = f"{names.get_name(module)}.weight.lora_{'a' if is_a else 'b'}"
        if name not in changes.get("without", ()):
            values = changes.get("tensors", {}).get(name, values)
            if kind := changes.get("quantised"):
                writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, values.astype(changes.get("dtype", np.float32)))
    for name in changes.get("more", ()):
        writer.add_tensor(name, np.ones((8, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def made(world: World, tmp_path: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    adapter = making.make_adapter(world.base, tmp_path / name, peft.LoraConfig(**CONFIGS[name]), seed=5)
    return adapter, write(adapter, tmp_path / f"{name}-gguf", world.config, **changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_is_served_as_peft_s_adapter(world: World, tmp_path: Path, name: str) -> None:
    adapter, folder = made(world, tmp_path, name)
    wanted, got = world.served(adapter), world.served(folder)
    assert got.modules == wanted.modules and got.invocation_ids == wanted.invocation_ids
    assert got.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(got.tensors[key], wanted.tensors[key]) for key in wanted.tensors)
    assert got.scaling == wanted.scaling


def test_alpha_0_scales_nothing(world: World, tmp_path: Path) -> None:
    """As in llama.cpp."""
    adapter, folder = made(world, tmp_path, "ranks", alpha=0.0)
    got, wanted = world.served(folder).tensors, load_file(adapter / "adapter_model.safetensors")
    for module in ("self_attn.q_proj", "mlp.up_proj"):
        b = wanted[f"base_model.model.model.layers.1.{module}.lora_B.weight"]
        assert torch.equal(got[f"model.layers.1.{module}.B"], b)


def test_half_precision(world: World, tmp_path: Path) -> None:
    adapter, folder = made(world, tmp_path, "linears", dtype=np.float16)
    wanted, got = world.served(adapter), world.served(folder)
    for key, tensor in wanted.tensors.items():
        torch.testing.assert_close(got.tensors[key], tensor, rtol=2e-3, atol=1e-4)


GATE_A = "blk.0.ffn_gate.weight.lora_a"
BROKEN: list[tuple[dict[str, Any], type[AdapterError], str]] = [
    ({"architecture": "qwen2"}, AdapterInvalid, "made for the architecture qwen2"),
    ({"kind": "model"}, AdapterInvalid, "holds a model, not a LoRA"),
    ({"without": ["blk.0.attn_q.weight.lora_a"]}, AdapterInvalid, "one of the two factors of blk.0.attn_q.weight"),
    ({"more": ["blk.0.attn_norm.weight"]}, NotServed, "blk.0.attn_norm.weight is not a factor"),
    ({"metadata": {"adapter.lora.alpha": "4"}}, AdapterInvalid, "adapter.lora.alpha is '4'; it must be a number"),
    ({"metadata": {"adapter.lora.alpha": float("nan")}}, AdapterInvalid, "adapter.lora.alpha is nan; it must be a"),
    ({"metadata": {"adapter.alora.invocation_tokens": 5.0}}, AdapterInvalid, "invocation_tokens is 5.0; it must be a"),
    ({"tensors": {GATE_A: np.ones((4, 65), np.float32)}}, AdapterInvalid, "gate_proj.lora_A.weight has shape"),
    ({"tensors": {GATE_A: np.ones((3, 64), np.float32)}}, AdapterInvalid, "gate_proj.lora_B.weight has shape"),
    ({"tensors": {GATE_A: np.ones((2, 2, 64), np.float32)}}, NotServed, "lora_a has 3 dimensions"),
    ({"tensors": {GATE_A: np.ones((4, 64), np.float64)}, "dtype": np.float64}, NotServed, "has the type F64"),
    ({"more": ["blk.9.attn_q.weight.lora_a", "blk.9.attn_q.weight.lora_b"]}, AdapterInvalid, "no place in the base"),
]


@pytest.mark.parametrize(("changes", "error", "reason"), BROKEN, ids=[reason for _, _, reason in BROKEN])
def test_what_is_not_served_is_refused_with_the_reason(
    world: World, tmp_path: Path, changes: dict[str, Any], error: type[AdapterError], reason: str
) -> None:
    """By the loader, and by the command that reads only headers."""
    _, folder = made(world, tmp_path, "linears", **changes)
    with pytest.raises(error, match=reason):
        world.served(folder)
    with pytest.raises(error, match=reason):
        world.checked(folder)


def test_headers_tell_what_is_served(world: World, tmp_path: Path) -> None:
    _, folder = made(world, tmp_path, "ranks")
    validation = world.checked(folder)
    assert validation.has_headers
    assert (validation.rank, validation.num_modules) == (4, 6)


def test_without_alpha_nothing_is_scaled(world: World, tmp_path: Path) -> None:
    """As in llama.cpp."""
    adapter, folder = made(world, tmp_path, "linears", metadata={"adapter.lora.alpha": None})
    got, b = world.served(folder).tensors, load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    assert torch.equal(got[f"{name}.B"], b[f"base_model.model.{name}.lora_B.weight"])


def test_blocks_of_8_bits(world: World, tmp_path: Path) -> None:
    """As convert_lora_to_gguf.py writes them: factors of the multiples of 32 that blocks need."""
    config = peft.LoraConfig(r=32, lora_alpha=6, target_modules=["q_proj", "gate_proj"])
    adapter = making.make_adapter(world.base, tmp_path / "wide", config, seed=5)
    folder = write(adapter, tmp_path / "q8", world.config, quantised=gguf.GGMLQuantizationType.Q8_0)
    wanted, got = world.served(adapter), world.served(folder)
    assert world.checked(folder).rank == 32
    for key, tensor in wanted.tensors.items():
        torch.testing.assert_close(got.tensors[key], tensor, rtol=0, atol=float(tensor.abs().max()) / 127)


def test_a_file_that_changes_while_it_is_read(world: World, tmp_path: Path) -> None:
    """Its digest must be that of the tensors, so it is read again."""
    _, folder = made(world, tmp_path, "linears")
    with layout.open_adapter(folder, making.LIMIT, world.reader.skeleton) as opened:
        opened.check_unchanged()
        with (folder / "adapter.gguf").open("ab") as file:
            file.write(b"more")
        with pytest.raises(AdapterChanged):
            opened.check_unchanged()


def test_a_count_that_the_file_has_no_room_for(world: World, tmp_path: Path) -> None:
    """gguf's reader would build a list of all items before it looks at the file's size."""
    entry = b"".join([_text(b"a"), struct.pack("<IIQ", 9, 4, 1 << 40)])
    (tmp_path / "adapter.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry)
    with pytest.raises(AdapterInvalid, match=r"it should have 1099511627776 items of a"):
        world.served(tmp_path)


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


BROKEN_FILES = {
    b"": "adapter.gguf is empty",
    b"GGUF": "not a file of llama.cpp: its header is longer than the file",
    b"GGUF" + b"\xff" * 200: "not a file of llama.cpp: its version is 4294967295",
    b"no": "not a file of llama.cpp: its header is longer than the file",
    b"no more": "not a file of llama.cpp: it does not begin with GGUF",
}


@pytest.mark.parametrize(("content", "reason"), BROKEN_FILES.items(), ids=["empty", "cut", "huge", "short", "other"])
def test_a_broken_file_is_invalid(world: World, tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "adapter.gguf").write_bytes(content)
    with pytest.raises(AdapterInvalid, match=reason):
        world.served(tmp_path)


def test_a_folder_with_one_is_an_adapter(world: World, tmp_path: Path) -> None:
    """A folder with a model, or with several files, is none; PEFT's files come first."""
    _, folder = made(world, tmp_path, "linears")
    write(tmp_path / "linears", tmp_path / "model", world.config, kind="model")
    source = LocalSource([tmp_path], making.LIMIT)
    assert set(source.names()) == {"linears", "linears-gguf"}
    sizes: dict[str, int | None] = {"adapter.gguf": 100, "README.md": 5}
    assert sources.choose(sizes, "x", 1000, lambda name: b"") == ["adapter.gguf"]
    with pytest.raises(AdapterInvalid, match=r"2 \.gguf files"):
        sources.choose({**sizes, "other.gguf": 1}, "x", 1000, lambda name: b"")
    both: dict[str, int | None] = {**sizes, "adapter_config.json": 5, "adapter_model.safetensors": 5}
    assert sources.choose(both, "x", 1000, lambda name: b"") == ["adapter_config.json", "adapter_model.safetensors"]
    assert folder.is_dir()
