"""From a loaded network to a `Model`: the layer pass, then the facts that others may know."""

from typing import Any

import torch
from torch import nn

from lorikeet.shard.attention import AttentionBackend
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.layers import replace_layers
from lorikeet.shard.model.model import Model, ModelInfo
from lorikeet.shard.model.quantization.layers import num_parameters
from lorikeet.shard.model.rotary import tabulate_rotary
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.model.tensor_parallel.partitioning import join, partition_network


def assemble(
    network: nn.Module,
    text_config: Any,
    backend: AttentionBackend,
    dtype: torch.dtype,
    inputs: StepInputs,
    num_positions: int,
    group: Group | None = None,
    quantization: str = "",
    fusions: str = "auto",
) -> Model:
    """Replace the layers of `network`, which this takes over, and wrap it. No position reaches `num_positions`. With
    other ranks in `group`, this one's part of it. Raises ValueError where that cannot be.

    `quantization`: what its weights are quantised by, for others to know; `fusions`: as in `ShardConfig`.
    """
    info = ModelInfo(
        model_type=text_config.model_type,
        vocab_size=text_config.vocab_size,
        max_positions=getattr(text_config, "max_position_embeddings", None),
        dtype=dtype,
        device=inputs.device,
        quantization=quantization,
        num_layers=text_config.num_hidden_layers,
        num_parameters=num_parameters(network),
    )
    tabulate_rotary(network, num_positions, torch.empty(1, dtype=dtype, device=inputs.device))
    if group is None:
        targets = replace_layers(network, backend, inputs, dtype, fusions=fusions)
        return Model(network, backend, inputs, info, targets)
    cuts = partition_network(network, text_config, group)
    network.to(inputs.device)
    targets = replace_layers(network, backend, inputs, dtype, is_whole=False)
    return Model(network, backend, inputs, info, targets, lambda: join(network, cuts, group))
