"""Writes `.gguf` files for tests: a tiny model with its tokenizer, its matrices in any tensor type."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lorikeet.proto.gguf.header import TYPES
from lorikeet.shard.model.gguf import tokenizer as tokenizers
from lorikeet.shard.model.gguf.folder import FolderRequest, main

needs_tokenizers = pytest.mark.skipif(
    tokenizers.SPLITS is None, reason="transformers 5.18 is the first that makes tokenizers of .gguf files"
)

HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,),
    "Q2_0": (0,),
}  # fmt: skip
"""Where a block has numbers in half precision."""
SPREADS = {
    "Q8_K": 0.0024, "Q2_K": 0.0083, "Q3_K": 0.0046, "Q4_K": 0.00055, "Q5_K": 0.00023, "Q6_K": 0.0001, "IQ1_S": 0.021,
    "IQ1_M": 0.021, "IQ2_XXS": 0.0032, "IQ2_XS": 0.0029, "IQ2_S": 0.003, "IQ3_XXS": 0.0012, "IQ3_S": 0.0015,
    "IQ4_NL": 0.0024, "IQ4_XS": 0.00012, "Q1_0": 0.17, "Q2_0": 0.13,
}  # fmt: skip
"""Spreads of drawn scales with which weights have the size of a small model's, 0.16: with larger ones attention is at
one position alone, or between two by chance, and smaller ones change nothing.
"""
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
"""Types that the package writes. Bytes of others are drawn."""


def random_rows(kind: str, num_out: int, num_in: int, seed: int, spread: float = 0.01) -> np.ndarray[Any, Any]:
    """[out, bytes] of any values; scales are small."""
    drawn = np.random.default_rng(seed)
    form = next(form for form in TYPES.values() if form.name == kind)
    blocks = drawn.integers(0, 256, (num_out, num_in // form.size, form.num_bytes), dtype=np.uint8)
    scales = (drawn.standard_normal((2, *blocks.shape[:2])) * spread).astype(np.float16)
    for place, halves in zip(HALVES.get(kind, ()), scales, strict=False):
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    if kind == "Q8_K":
        blocks[..., :4] = scales[0].astype(np.float32)[..., None].view(np.uint8)
    elif kind == "IQ1_M":  # four bits of the scale in each of four pairs of bytes
        bits = scales[0].view(np.uint16)
        for index in range(4):
            upper = (bits >> 4 * index & 15).astype(np.uint8) << 4
            blocks[..., 49 + 2 * index] = blocks[..., 49 + 2 * index] & 15 | upper
    elif kind == "MXFP4":
        blocks[..., 0] = drawn.integers(112, 122, blocks.shape[:2])
    elif kind == "NVFP4":
        blocks[..., :4] = drawn.integers(0, 24, (*blocks.shape[:2], 4))
    return blocks.reshape(num_out, -1)


def gguf_name(name: str, architecture: str = "llama") -> str:
    """The name in a file of a tensor of transformers', by the package's table."""
    import gguf

    (kind,) = [kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture]
    actual: str | None = gguf.get_tensor_name_map(kind, 64).get_name(name, try_suffixes=(".weight", ".bias"))
    assert actual is not None
    return actual


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k as files have them: halves of a head alternate. weight: [out, in]."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_model(
    folder: Path,
    path: Path,
    kind: str = "Q8_0",
    metadata: dict[str, Any] | None = None,
    architecture: str = "llama",
    tensors: dict[str, torch.Tensor] | None = None,
    **types: str,
) -> None:
    """The model of a folder, with its tokenizer, as llama.cpp's conversion writes it. Matrices have the type `kind` or
    that of `types`, by the tensor's name in the file, with `_` for `.`; others are F32. Tensors of types that are not
    WRITTEN are drawn. `tensors`: further ones, F32.
    """
    import gguf
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    _add_configuration(writer, config, architecture)
    metadata = {"tokenizer.ggml.pre": "gpt-2"} | (metadata or {})
    _add_tokenizer(writer, tokenizer)
    for key, value in metadata.items():
        kinds = {str: "STRING", int: "UINT32", float: "FLOAT32", bool: "BOOL"}
        writer.kv_data[0][key] = gguf.GGUFValue(value, gguf.GGUFValueType[kinds[type(value)]])
    for index, (name, weight) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = permuted(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        stored = gguf_name(name, architecture)
        expected = types.get(stored.replace(".", "_"), kind) if weight.dim() == 2 else "F32"
        of_kind = gguf.GGMLQuantizationType[expected]
        if expected in WRITTEN:
            data = gguf.quants.quantize(weight.float().numpy(), of_kind)
        else:
            data = random_rows(expected, len(weight), weight.shape[1], seed=index, spread=SPREADS.get(expected, 0.003))
        writer.add_tensor(stored, data, raw_dtype=of_kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split_model(path: Path, folder: Path, count: int) -> list[Path]:
    """The model of a file in `count` files, as llama.cpp's `llama-gguf-split` names and describes them: the metadata is
    in the first.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    folder.mkdir()
    paths = [folder / f"tiny-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for number, part in enumerate(paths):
        writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    of_items = field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(field.name, field.contents(), field.types[0], of_items)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def _add_configuration(writer: Any, config: Any, architecture: str) -> None:
    import gguf

    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if architecture != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    import gguf

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    special = set(tokenizer.all_special_tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def answer_of(path: Path, folder: Path, needs_tokenizer: bool = True) -> dict[str, Any]:
    """What the process that makes a folder for a file answers."""
    answer = folder.with_suffix(".answer")
    request = FolderRequest("tiny", str(path), str(folder), str(answer), needs_tokenizer)
    folder.with_suffix(".json").write_text(json.dumps(vars(request)))
    code = main(str(folder.with_suffix(".json")))
    actual: dict[str, Any] = json.loads(answer.read_text())
    assert code == (1 if "error" in actual else 0)
    return actual
