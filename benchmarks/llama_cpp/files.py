"""The random Llama and its adapters as `.gguf` files, as llama.cpp's own conversion writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

LLAMA = "llama"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 64)


def model_file(folder: Path, kind: str) -> Path:
    """The model of a folder with its matrices in a tensor type: BF16, Q8_0 or Q4_0. Made once."""
    path = folder / f"{kind}.gguf"
    if path.exists():
        return path
    config = AutoConfig.from_pretrained(folder)
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, LLAMA)
    _add_configuration(writer, config)
    _add_tokenizer(writer, folder)
    for name, weight in load_file(folder / "model.safetensors").items():
        of_kind = gguf.GGMLQuantizationType[kind if weight.dim() == 2 else "F32"]
        data = gguf.quants.quantize(_reordered(name, weight, config).float().numpy(), of_kind)
        writer.add_tensor(_stored(name), data, raw_dtype=of_kind)
    _write(writer, unfinished, path)
    return path


def adapter_file(folder: Path, base: Path) -> Path:
    """An adapter that PEFT saved, in half precision. Made once."""
    path = folder / "adapter.gguf"
    if path.exists():
        return path
    config, settings = AutoConfig.from_pretrained(base), json.loads((folder / "adapter_config.json").read_text())
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, LLAMA)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(settings["lora_alpha"]))
    for name, weight in load_file(folder / "adapter_model.safetensors").items():
        module, _, matrix = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        rows = _reordered(f"{module}.weight", weight, config) if matrix == "lora_B" else weight
        writer.add_tensor(f"{_stored(f'{module}.weight')}.{matrix.lower()}", rows.half().numpy())
    _write(writer, unfinished, path)
    return path


def _reordered(name: str, weight: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Rows of q and k in the order of files: halves of a head alternate. weight: [out, in]."""
    num_heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    heads = next((number for end, number in num_heads.items() if name.endswith(end)), None)
    if heads is None:
        return weight
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).contiguous()


def _stored(name: str) -> str:
    """The name in a file of a tensor of transformers', by the package's table."""
    found = _NAMES.get_name(name, try_suffixes=(".weight",))
    if found is None:
        raise ValueError(f"{name} has no name in a .gguf file")
    return found


def _add_configuration(writer: Any, config: PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope: Mapping[str, Any] = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: Any, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)


def _write(writer: Any, unfinished: Path, path: Path) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
