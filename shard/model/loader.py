"""Loads a checkpoint with transformers: its configuration, the reason why it cannot be served, and its network, ready
for the layer pass.
"""

import pickle
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from lorikeet.proto import pooling, quantization
from lorikeet.proto.pooling import PooledModel
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.moe import experts
from lorikeet.shard.model.quantization import layers as quantized
from lorikeet.shard.model.quantization.integers import move
from lorikeet.shard.model.quantization.packed_files import load_packed
from lorikeet.shard.system import gpu

log = structlog.get_logger()

PROGRESS_S = 5.0
"""Between log lines about the weights."""
SERVED_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers that are served."""
HAS_BFLOAT16 = (8, 0)
"""Compute capability of the first devices with bfloat16."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(config: ShardConfig) -> Any:
    """The checkpoint's configuration (transformers' class)."""
    try:
        return AutoConfig.from_pretrained(
            config.model_path, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (ValueError, KeyError, OSError) as failure:
        sentence = str(failure).strip().splitlines()[0]
        raise ValueError(f"cannot read the configuration of {config.model_id}: {sentence}") from failure


def read_pooling(config: ShardConfig, checkpoint: Any) -> PooledModel | None:
    """How the model's prompts become vectors or scores; None for a model that generates text."""
    try:
        return pooling.read(Path(config.model_path), checkpoint.to_dict(), config.pooling or "", config.embedding_dim)
    except (ValueError, OSError) as reason:
        raise ValueError(f"cannot serve {config.model_id}: {reason}") from None


def reject_unservable(checkpoint: Any, is_pooled: bool = False) -> None:
    """Raise ValueError when a model of this configuration cannot be served."""
    reason = unsupported_reason(checkpoint, is_pooled)
    if reason is not None:
        raise ValueError(f"cannot serve {checkpoint.model_type}: {reason}")


def unsupported_reason(checkpoint: Any, is_pooled: bool = False) -> str | None:
    """Why a model of this configuration cannot be served, or None. The probe (probe.py) finds further reasons.

    `is_pooled`: whether it computes vectors or scores.
    """
    if getattr(checkpoint, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and only decoders are served"
    for name, kind in (("vision_config", "images"), ("audio_config", "audio")):
        if getattr(checkpoint, name, None) is not None:
            return f"it takes {kind}, and only text models are served"
    text = checkpoint.get_text_config()
    other = set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS
    if other:
        return f"it has layers other than full and sliding attention ({', '.join(sorted(other))})"
    if getattr(text, "attention_chunk_size", None):
        return "its attention works in chunks, which are not served"
    remote = getattr(checkpoint, "auto_map", None) or {}
    if is_pooled:
        return None
    if type(checkpoint) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in remote:
        return "transformers has no causal language model of this kind"
    return None


def choose_dtype(config: ShardConfig, checkpoint: Any) -> torch.dtype:
    """The configured dtype, else the checkpoint's. float16 has no fast path on CPU and becomes float32 there; bfloat16
    becomes float16 on CUDA devices without it. Raises ValueError for a configured dtype that the device lacks.
    """
    device = torch.device(config.device)
    has_bfloat16 = device.type != "cuda" or gpu.capability(device) >= HAS_BFLOAT16
    if config.dtype is not None:
        if config.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {config.dtype!r}; known: {', '.join(DTYPES)}")
        if config.dtype == "bfloat16" and not has_bfloat16:
            raise ValueError(f"{config.device} has no bfloat16 (compute capability below 8.0): use --dtype float16")
        return DTYPES[config.dtype]
    dtype = getattr(checkpoint, "dtype", None) or torch.float32
    dtype = dtype if isinstance(dtype, torch.dtype) else DTYPES[str(dtype)]
    if dtype == torch.float16 and device.type == "cpu":
        return torch.float32
    if dtype == torch.bfloat16 and not has_bfloat16:
        log.warning("bfloat16_becomes_float16", model_id=config.model_id, device=config.device)
        return torch.float16
    return dtype


def load_network(
    config: ShardConfig,
    checkpoint: Any,
    dtype: torch.dtype,
    method: str | None = None,
    is_whole: bool = True,
    auto: Any = AutoModelForCausalLM,
) -> nn.Module:
    """The network in eval mode, quantised by `method`: on the device, or in host memory where only a part of it will be
    on the device. `auto`: transformers' class for it. Raises ValueError for files that are broken or hold code.
    """
    options = {
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
        with logged_progress():
            network = _load(config, options, method) if auto is AutoModelForCausalLM else _whole(config, options, auto)
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


@contextmanager
def logged_progress() -> Iterator[None]:
    """Log how far transformers has come with the weights, in place of its progress bar."""

    def hook(make_bar: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return _reported(args[0]) if options.get("desc") == "Loading weights" else make_bar(*args, **options)

    before = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _reported(weights: Collection[Any]) -> Iterator[Any]:
    """The weights, with a log line every PROGRESS_S."""
    reported_at = began = time.monotonic()
    for number, weight in enumerate(weights):
        if (now := time.monotonic()) - reported_at >= PROGRESS_S:
            reported_at = now
            percent = 100 * number // len(weights)
            log.info("weights_loading", percent=percent, loaded=number, total=len(weights), seconds=round(now - began))
        yield weight


def _whole(config: ShardConfig, options: dict[str, Any], auto: Any) -> nn.Module:
    """A network whose weights are all in the files, except for a pooling layer that its task does not use."""
    network: nn.Module
    network, report = auto.from_pretrained(config.model_path, output_loading_info=True, **options)
    missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise ValueError(f"cannot serve {config.model_id}: its files lack weights, such as {missing[0]}")
    return network


def _load(config: ShardConfig, options: dict[str, Any], method: str | None) -> nn.Module:
    """The network, quantised by `method`. Raises ValueError with the error of the method's package."""
    if method is None:
        plain: nn.Module = AutoModelForCausalLM.from_pretrained(config.model_path, **options)
        return plain
    if method == "gguf":
        return _load_gguf(config, options)
    rounds, device = _rounds_activations(config), torch.device(config.device)
    made_by = {name: options[name] for name in ("attn_implementation", "experts_implementation")}
    network: nn.Module
    try:
        if method in quantization.PACKED and quantization.multiplies_integers(method, options["config"].to_dict()):
            network = load_packed(Path(config.model_path), options["config"], options["dtype"], made_by, rounds)
            move(network, device)
            return network
        options |= quantized.loading(method, options["config"], options["dtype"], config.device)
        network = AutoModelForCausalLM.from_pretrained(config.model_path, **options)
        if method in quantization.INTEGERS and device.type != "cpu" and any(map(experts.is_experts, network.modules())):
            raise ValueError(
                "mixture-of-experts models are supported on CPU only: use fp8, which keeps experts in --dtype"
            )
        quantized.quantize_loaded(network, method, options["dtype"], config.device, rounds)
    except (ImportError, RuntimeError, ValueError, AssertionError) as failure:
        sentence = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        raise ValueError(f"cannot serve {config.model_id} quantised by {method}: {sentence}") from failure
    return network


def _rounds_activations(config: ShardConfig) -> bool:
    return config.device == "cpu" and config.quantize_activations != "none"


def _load_gguf(config: ShardConfig, options: dict[str, Any]) -> nn.Module:
    """The network of a `.gguf` file. Raises ValueError with a reason."""
    from lorikeet.shard.model.gguf.file import GgufFile
    from lorikeet.shard.model.gguf.network import load_gguf

    made_by = {name: options[name] for name in ("attn_implementation", "experts_implementation")}
    try:
        file = GgufFile(Path(config.model_path) / quantization.GGUF_NAME)
        network = load_gguf(file, options["config"], options["dtype"], made_by, _rounds_activations(config))
        move(network, torch.device(config.device))
        return network
    except (ValueError, NotImplementedError) as reason:
        raise ValueError(f"cannot serve {config.model_id}: {reason}") from reason
