"""One base model: transformers' code, our layers, our attention, paged KV."""

import torch

from proto import quantization
from shard import attention
from shard.batch import StepInputs
from shard.config import ShardConfig
from shard.model.assemble import assemble
from shard.model.loader import choose_dtype, load_network, read_config
from shard.model.model import Model, ModelInfo
from shard.model.probe import probe
from shard.model.refusals import refuse_unservable
from shard.model.rotary import fix_rotary
from shard.ranks.group import Group

__all__ = ["Model", "ModelInfo", "load_model"]


def load_model(config: ShardConfig, group: Group | None = None) -> Model:
    """Load the model in `config.model_path`, or this rank's part of it. Raises ValueError with a reason when it cannot
    be served.
    """
    checkpoint = read_config(config)
    refuse_unservable(checkpoint)
    text_config = checkpoint.get_text_config()
    try:
        method = quantization.choose(config.quantize, checkpoint.to_dict())
        fix_rotary(text_config, config.max_total_tokens)
    except ValueError as reason:
        raise ValueError(f"cannot serve {checkpoint.model_type}: {reason}") from None
    probe(config, checkpoint, group)
    dtype = choose_dtype(config, checkpoint)
    device = torch.device(config.device)
    backend = attention.create(config.attention, device, dtype, config.page_size, config.kv_cache_dtype)
    network = load_network(config, checkpoint, dtype, method, is_whole=group is None)
    inputs = StepInputs(backend.page_size, device)
    return assemble(network, text_config, backend, dtype, inputs, config.max_total_tokens, group, method or "")
