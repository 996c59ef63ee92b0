"""From a loaded network to a `Model`: the layer pass, then the facts that others may know."""

from typing import Any

import torch
from torch import nn

from shard.attention import AttentionBackend
from shard.batch import StepInputs
from shard.model.layers import replace_layers
from shard.model.model import Model, ModelInfo
from shard.model.rotary import tabulate_rotary


def assemble(
    network: nn.Module,
    text_config: Any,
    backend: AttentionBackend,
    dtype: torch.dtype,
    inputs: StepInputs,
    num_positions: int,
) -> Model:
    """Replace the layers of `network`, which this takes over, and wrap it. No position reaches `num_positions`."""
    info = ModelInfo(
        model_type=text_config.model_type,
        vocab_size=text_config.vocab_size,
        max_positions=getattr(text_config, "max_position_embeddings", None),
        dtype=dtype,
        device=inputs.device,
        num_layers=text_config.num_hidden_layers,
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
    )
    tabulate_rotary(network, num_positions, torch.empty(1, dtype=dtype, device=inputs.device))
    sites = replace_layers(network, backend, inputs, dtype)
    return Model(network, backend, inputs, info, sites)
