"""Writes `.gguf` files for tests: a tiny Llama with its tokenizer, its matrices in any tensor type."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from lorikeet.shard.model.gguf.blocks import FORMATS

SUPER = ("Q4_K", "Q5_K", "Q6_K")
"""Types that the package does not write: their bytes are drawn."""
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block has numbers in half precision."""


def random_rows(kind: str, num_out: int, num_in: int, seed: int, spread: float = 0.01) -> np.ndarray[Any, Any]:
    """[out, bytes] of any values; scales are small."""
    drawn = np.random.default_rng(seed)
    size = FORMATS[kind].num_bytes
    blocks = drawn.integers(0, 256, (num_out, num_in // (256 if kind in SUPER else 32), size), dtype=np.uint8)
    for place in HALVES[kind]:
        halves = (drawn.standard_normal(blocks.shape[:2]) * spread).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(num_out, -1)


PREFIX = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
          "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
          "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
          "post_attention_layernorm": "ffn_norm"}  # fmt: skip


def gguf_name(name: str) -> str:
    """The name of a Llama's tensor in a file."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name == "lm_head.weight" or name in whole:
        return whole.get(name, "output.weight")
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{PREFIX[part.removesuffix('.weight')]}.weight"


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k as files have them: halves of a head alternate. weight: [out, in]."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_llama(
    folder: Path, path: Path, kind: str = "Q8_0", metadata: dict[str, Any] | None = None, **types: str
) -> None:
    """The Llama of a folder, with its tokenizer, as a file. Matrices have the type `kind` or that of `types`, by the
    tensor's name in the file, with `_` for `.`; others are F32. Tensors of SUPER types are drawn.
    """
    import gguf
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_name("tiny")
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    _add_tokenizer(writer, tokenizer)
    for index, (name, weight) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = permuted(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        stored = gguf_name(name)
        wanted = types.get(stored.replace(".", "_"), kind) if weight.dim() == 2 else "F32"
        of_kind = gguf.GGMLQuantizationType[wanted]
        if wanted in SUPER:
            data = random_rows(wanted, len(weight), weight.shape[1], seed=index, spread=0.003)
        else:
            data = gguf.quants.quantize(weight.float().numpy(), of_kind)
        writer.add_tensor(stored, data, raw_dtype=of_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    import json

    import gguf

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    special = set(tokenizer.all_special_tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
