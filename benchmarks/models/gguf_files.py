"""The random Llama and its adapters as `.gguf` files, as llama.cpp's own conversion writes them."""

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig

from tests.shard.model.gguf.files import gguf_name, permuted, write_model


def model_file(folder: Path, kind: str) -> Path:
    """The model of a folder with its matrices in a tensor type: BF16, Q8_0 or Q4_0. Made once."""
    path = folder / f"{kind}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        write_model(folder, unfinished, kind, {"tokenizer.ggml.add_bos_token": False})
        unfinished.rename(path)
    return path


def adapter_file(folder: Path, base: Path) -> Path:
    """An adapter that PEFT saved, in half precision. Made once."""
    path = folder / "adapter.gguf"
    if path.exists():
        return path
    config, settings = AutoConfig.from_pretrained(base), json.loads((folder / "adapter_config.json").read_text())
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(settings["lora_alpha"]))
    for name, weight in load_file(folder / "adapter_model.safetensors").items():
        module, _, matrix = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        rows = _reordered(module, weight, config) if matrix == "lora_B" else weight
        writer.add_tensor(f"{gguf_name(f'{module}.weight')}.{matrix.lower()}", rows.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
    return path


def _reordered(module: str, weight: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """`lora_B` [out, rank] with its rows as files have them."""
    if module.endswith("q_proj"):
        return permuted(weight, config.num_attention_heads)
    return permuted(weight, config.num_key_value_heads) if module.endswith("k_proj") else weight
