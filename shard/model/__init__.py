"""One base model: transformers' code, our layers, our attention, paged KV."""

import torch

from shard import attention
from shard.batch import StepInputs
from shard.config import ShardConfig
from shard.model.layers import replace_layers
from shard.model.loader import choose_dtype, load_network, read_config
from shard.model.model import Model, ModelInfo
from shard.model.rotary import fix_rotary

__all__ = ["Model", "ModelInfo", "load_model"]


def load_model(config: ShardConfig) -> Model:
    """Load the model in `config.model_path`. Raises ValueError with a reason when it cannot be served."""
    checkpoint = read_config(config)
    fix_rotary(checkpoint.get_text_config(), config.max_total_tokens)
    dtype = choose_dtype(config, checkpoint)
    network = load_network(config, checkpoint, dtype)
    device = torch.device(config.device)
    backend = attention.create(config.attention, device, dtype, config.page_size)
    text = checkpoint.get_text_config()
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    inputs = StepInputs(backend.page_size, device)
    replace_layers(network, backend, inputs, dtype)
    info = ModelInfo(
        model_type=checkpoint.model_type,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        dtype=dtype,
        device=device,
        num_layers=text.num_hidden_layers,
        num_parameters=num_parameters,
    )
    return Model(network, backend, inputs, info)
