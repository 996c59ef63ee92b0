"""What transformers leaves out when it reads a configuration from the metadata of a `.gguf` file."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.integrations import gguf as integrations_gguf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lorikeet.shard.model.gguf.file import ROPE_FACTORS, ROPE_SCALING, GgufFile

_SOFTCAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
READ_AT_ONCE: Collection[str] = getattr(integrations_gguf, "GGUF_CONFIG_ARCHS", ())
"""Architectures whose metadata transformers reads fast. Empty before the version that does."""
VOCABULARY = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))
VALUES = {"gemma2": _SOFTCAPS, "gemma3": _SOFTCAPS}
"""Attributes of a configuration that transformers leaves at their defaults, and their keys, by architecture."""
HEAD_SIZE = "attention.key_length"
LOW, HIGH = 1.0, 4.0
"""`low_freq_factor` and `high_freq_factor` of every model with `rope_type: llama3`; files do not name them."""
ORIGINAL_LENGTH = 8192
"""Taken where no factor tells the original length."""
TOLERANCE = 1e-5
"""Relative, between a file's factors, which have been computed in float32, and transformers'."""
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Gemma with this many layers scales attention by the hidden size; files do not say so, and llama.cpp counts too."""


def check_metadata(file: GgufFile) -> None:
    """Raise ValueError for metadata that would make transformers build what the file has no tensors for."""
    if not isinstance(file.value("general.architecture"), str):
        raise ValueError("its metadata has no general.architecture")
    num_layers = file.of_architecture("block_count")
    if not isinstance(num_layers, int) or not 0 < num_layers <= len(file.tensors):
        raise ValueError(f"its metadata says {num_layers} layers, and it has {len(file.tensors)} tensors")


def read_configuration(folder: Path, name: str, file: GgufFile) -> Any:
    """transformers' configuration of `file`, whose metadata is written to `name` in `folder`.

    Of most architectures transformers reads every array item by item, which takes seconds for a vocabulary, of which a
    configuration has only the size.
    """
    if file.architecture in READ_AT_ONCE:
        file.write_metadata(folder / name)
        return AutoConfig.from_pretrained(folder, gguf_file=name)
    file.write_metadata(folder / name, without=VOCABULARY)
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    size = file.of_architecture("vocab_size") or len(file.value(VOCABULARY[0]) or ())
    if size:
        config.vocab_size = size
    return config


def complete(config: Any, file: GgufFile) -> None:
    """Add to a configuration what `file` says. Raises ValueError for positions that it cannot express."""
    for attribute, key in VALUES.get(file.architecture, {}).items():
        if (value := file.of_architecture(key)) is not None:
            setattr(config, attribute, value)
    if hasattr(config, "head_dim") and (size := file.of_architecture(HEAD_SIZE)) is not None:
        config.head_dim = size
    if file.architecture in LAYERS_OF_27B:
        _complete_gemma(config, file)
    if file.of_architecture(ROPE_SCALING) == "linear":
        rope = config.rope_parameters
        linear = {"rope_type": "linear", "factor": float(file.of_architecture("rope.scaling.factor"))}
        rope.get("full_attention", rope).update(linear)
    if ROPE_FACTORS in file.tensors:
        config.rope_parameters = llama3_parameters(config, file.dense(ROPE_FACTORS))


def _complete_gemma(config: Any, file: GgufFile) -> None:
    is_27b = config.num_hidden_layers == LAYERS_OF_27B[file.architecture]
    config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    pattern = file.of_architecture("attention.sliding_window_pattern")
    if isinstance(pattern, int):  # each layer of that number is full
        pattern = [bool((layer + 1) % pattern) for layer in range(config.num_hidden_layers)]
    if pattern is not None:
        config.layer_types = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]
    local = file.of_architecture("rope.freq_base_swa")
    if local is not None and "sliding_attention" in config.rope_parameters:
        config.rope_parameters["sliding_attention"]["rope_theta"] = local


def llama3_parameters(config: Any, factors: torch.Tensor) -> dict[str, Any]:
    """The parameters of `rope_type: llama3` whose frequencies are the plain ones over `factors`, [D / 2]. Raises
    ValueError if there are none.

    Factors are 1 for short wavelengths, the largest for long ones, and between them tell the original length.
    """
    theta, dim = config.rope_parameters["rope_theta"], 2 * len(factors)
    # [D / 2] float64: rounds per position, and the share of the plain frequency in the scaled one
    rounds = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim) / (2 * math.pi)
    largest = float(factors.max())
    plain = (1 / factors.double() - 1 / largest) / (1 - 1 / largest) if largest > 1 else torch.ones(len(factors))
    between = (plain > TOLERANCE) & (plain < 1 - TOLERANCE)
    lengths = ((plain * (HIGH - LOW) + LOW) / rounds)[between]
    values = {
        "rope_type": "llama3", "rope_theta": theta, "factor": largest, "low_freq_factor": LOW, "high_freq_factor": HIGH,
        "original_max_position_embeddings": round(float(lengths.median())) if len(lengths) else ORIGINAL_LENGTH,
    }  # fmt: skip
    if not torch.allclose(_factors(config, values), factors, rtol=TOLERANCE, atol=0):
        raise ValueError(f"its tensor {ROPE_FACTORS} does not match rope_type llama3: use the original checkpoint")
    return values


def _factors(config: Any, parameters: dict[str, Any]) -> torch.Tensor:
    """What transformers divides plain frequencies by: [D / 2] float32."""
    scaled = type(config).from_dict(config.to_dict() | {"rope_parameters": parameters})
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))[0]
    dim = 2 * len(frequencies)
    return parameters["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim) / frequencies
