"""From a folder with a configuration and weights to a network that is ready for the layer pass.

Knows transformers' loading; knows nothing of steps or pages.
"""

import pickle
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.moe import experts
from lorikeet.shard.model.quantization import layers as quantized

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(config: ShardConfig) -> Any:
    """The checkpoint's own configuration (transformers' class)."""
    try:
        return AutoConfig.from_pretrained(
            config.model_path, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (ValueError, KeyError, OSError) as failure:
        sentence = str(failure).strip().splitlines()[0]
        raise ValueError(f"cannot read the configuration of {config.model_id}: {sentence}") from failure


def choose_dtype(config: ShardConfig, checkpoint: Any) -> torch.dtype:
    """What was asked for, else the checkpoint's own; float16 has no fast path on CPU and becomes float32 there."""
    if config.dtype is not None:
        if config.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {config.dtype!r}; known: {', '.join(DTYPES)}")
        return DTYPES[config.dtype]
    dtype = getattr(checkpoint, "dtype", None) or torch.float32
    if dtype == torch.float16 and config.device == "cpu":
        return torch.float32
    return dtype if isinstance(dtype, torch.dtype) else DTYPES[str(dtype)]


def load_network(
    config: ShardConfig, checkpoint: Any, dtype: torch.dtype, method: str | None = None, is_whole: bool = True
) -> nn.Module:
    """Weights in place on the device, in host memory where only a part of them is to go there, in eval mode, quantised
    by `method`. Raises ValueError for files that are broken or hold code.
    """
    told = {
        "config": checkpoint,
        "dtype": dtype,
        "device_map": {"": config.device} if is_whole and config.device != "cpu" else None,
        "attn_implementation": NAME,
        "experts_implementation": experts.NAME,
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": True,
        "weights_only": True,
    }
    try:
        network = _load(config, told, method)
    except pickle.UnpicklingError as failure:
        raise ValueError(
            f"cannot load the weights of {config.model_id}: a .bin file of it is broken or holds more than tensors. "
            "Code in it was not run and never is: convert it to safetensors"
        ) from failure
    except SafetensorError as failure:
        reason = f"cannot load the weights of {config.model_id}: a broken safetensors file: {failure}"
        raise ValueError(reason) from failure
    network.requires_grad_(False)
    return network.eval()


def _load(config: ShardConfig, told: dict[str, Any], method: str | None) -> nn.Module:
    """The network, quantised by `method`. Raises ValueError with what the method's package says against it."""
    if method is None:
        plain: nn.Module = AutoModelForCausalLM.from_pretrained(config.model_path, **told)
        return plain
    try:
        told |= quantized.loading(method, told["config"], told["dtype"], config.device)
        network: nn.Module = AutoModelForCausalLM.from_pretrained(config.model_path, **told)
        quantized.quantize_loaded(network, method, told["dtype"], config.device)
    except (ImportError, RuntimeError, ValueError, AssertionError) as failure:
        sentence = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        raise ValueError(f"cannot serve {config.model_id} quantised by {method}: {sentence}") from failure
    return network
