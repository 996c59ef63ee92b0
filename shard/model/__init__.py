"""One base model: transformers' modules with our layers, our attention and paged KV."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch

from lorikeet.proto.pooling import PooledModel
from lorikeet.proto.process import return_freed_memory
from lorikeet.proto.quantization import activations_of, describe, multiplies_integers
from lorikeet.proto.quantization import choose as choose_quantization
from lorikeet.shard import attention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.adapters.added_tokens import extend
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.layers import quantized_matrices
from lorikeet.shard.model.loader import choose_dtype, load_network, read_config, read_pooling, reject_unservable
from lorikeet.shard.model.model import Model, ModelInfo
from lorikeet.shard.model.pooling.loading import AUTO, assemble_pooled
from lorikeet.shard.model.pooling.probe import probe_pooled, wanted_rows
from lorikeet.shard.model.probe import OVERFLOW_TOKENS, probe, reject_overflow
from lorikeet.shard.model.quantization.layers import check_batch_invariance
from lorikeet.shard.model.rotary import fix_rotary
from lorikeet.shard.model.tensor_parallel.group import Group

log = structlog.get_logger()

__all__ = ["Model", "ModelInfo", "load_model"]


def load_model(config: ShardConfig, group: Group | None = None) -> Model:
    """Load the model in `config.model_path`, or this rank's part of it. Raises ValueError with a reason when it cannot
    be served.
    """
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the thread's current device
        torch.set_float32_matmul_precision("highest")  # no TF32, whatever the environment prefers
    checkpoint = read_config(config)
    pooled = read_pooling(config, checkpoint)
    reject_unservable(checkpoint, is_pooled=pooled is not None)
    text_config = checkpoint.get_text_config()
    try:
        method = choose_quantization(config.quantize, checkpoint.to_dict())
        if config.adapter_extra_vocab_size and (method or group is not None or pooled):
            raise ValueError(
                "--adapter-extra-vocab-size needs a generating model with plain weights on one device: no --quantize, "
                "no --num-shard"
            )
        is_integers = multiplies_integers(method, checkpoint.to_dict())
        activations = activations_of(is_integers, config.quantize_activations, config.device)
        if method is not None and group is not None:
            raise ValueError(f"a network quantised by {method} cannot be split over several devices: use --num-shard 1")
        rotary_factors = fix_rotary(text_config, config.max_total_tokens)
    except ValueError as reason:
        raise ValueError(f"cannot serve {checkpoint.model_type}: {reason}") from None
    if pooled is not None:
        return _load_pooled(config, checkpoint, pooled, method, group)
    probe(config, checkpoint, group)
    dtype = choose_dtype(config, checkpoint)
    backend = attention.create(config.attention, device, dtype, config.page_size, config.kv_cache_dtype)
    if group is not None:
        group.check_page_size(backend.page_size)
    network = load_network(config, checkpoint, dtype, method, is_whole=group is None)
    num_extra = config.adapter_extra_vocab_size
    if num_extra:
        _extend(config, network, text_config)
    inputs = StepInputs(backend.page_size, device)
    stated = describe(method, activations)
    model = assemble(
        network, text_config, backend, dtype, inputs, config.max_total_tokens, group, stated, config.fusions, num_extra
    )
    model.info = replace(model.info, rotary_factors=rotary_factors)
    num_tokens = min(OVERFLOW_TOKENS, config.max_total_tokens)
    reject_overflow(model, _first_token(text_config), num_tokens, range(num_tokens))
    return_freed_memory()  # the check needs some
    try:
        if method is not None:
            matrices = quantized_matrices(network)
            if matrices or method != "gguf":  # all its tensors may be plain
                check_batch_invariance(matrices, device)
            if device.type == "cuda" and not all(matrix.reads_few_bytes(device) for matrix in matrices):
                log.warning("quantization_saves_memory_not_time", method=method)
    except ValueError as reason:
        raise ValueError(f"cannot serve {config.model_id} quantised by {method}: {reason}") from None
    return_freed_memory()
    return model


def _extend(config: ShardConfig, network: torch.nn.Module, text_config: Any) -> None:
    """Make room for the tokens that adapters add. Raises ValueError where that is not possible."""
    try:
        extend(network, text_config, config.adapter_extra_vocab_size)
    except ValueError as reason:
        raise ValueError(f"cannot serve {config.model_id} with --adapter-extra-vocab-size: {reason}") from None


def _first_token(text_config: Any) -> int:
    """The token that texts begin with; any, where the configuration names none."""
    token = getattr(text_config, "bos_token_id", None)
    return token if isinstance(token, int) else 0


def _load_pooled(
    config: ShardConfig, checkpoint: Any, pooled: PooledModel, method: str | None, group: Group | None
) -> Model:
    """A model that computes vectors or scores. Raises ValueError with a reason when it cannot be served."""
    kind, on = checkpoint.model_type, torch.device(config.device)
    if group is not None:
        raise ValueError(
            f"cannot serve {kind}: an embedding or classification model cannot be split: use --num-shard 1"
        )
    if method is not None:
        raise ValueError(f"cannot serve {kind}: an embedding or classification model cannot be quantised by {method}")
    probe_pooled(config, checkpoint, pooled)
    dtype = choose_dtype(config, checkpoint)
    backend = attention.create(config.attention, on, dtype, config.page_size, config.kv_cache_dtype)
    network = load_network(config, checkpoint, dtype, auto=AUTO[pooled.task])
    inputs = StepInputs(backend.page_size, on)
    text_config, folder = checkpoint.get_text_config(), Path(config.model_path)
    try:
        model = assemble_pooled(
            network, text_config, pooled, backend, dtype, inputs, config.max_total_tokens, folder, config.fusions
        )
    except (OSError, KeyError) as failure:
        raise ValueError(f"cannot serve {config.model_id}: what follows its pooling: {failure}") from failure
    num_tokens = min(OVERFLOW_TOKENS, config.max_total_tokens)
    reject_overflow(model, _first_token(text_config), num_tokens, wanted_rows(num_tokens, pooled))
    return model
