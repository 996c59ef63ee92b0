"""Builds a `Model` from a loaded network: partitioning, rotary tables, the layer pass, the model's facts."""

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
from lorikeet.shard.model.tensor_parallel.partitioning import connect_ranks, partition_network


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
    num_extra: int = 0,
) -> Model:
    """Replace the layers of `network`, which the model owns from then on. Positions are below `num_positions`. With a
    `group` of ranks, keep this rank's part. Raises ValueError where that is not possible.

    `quantization`: the method that its weights are quantised by; `fusions`: as in `ShardConfig`; `num_extra`: as in
    `ModelInfo`.
    """
    info = ModelInfo(
        model_type=text_config.model_type,
        vocab_size=text_config.vocab_size,
        dtype=dtype,
        device=inputs.device,
        quantization=quantization,
        num_extra=num_extra,
        num_layers=text_config.num_hidden_layers,
        num_parameters=num_parameters(network),
    )
    tabulate_rotary(network, num_positions, torch.empty(1, dtype=dtype, device=inputs.device))
    if group is None:
        targets = replace_layers(network, backend, inputs, dtype, fusions=fusions)
        return Model(network, backend, inputs, info, targets)
    partitions = partition_network(network, text_config, group)
    network.to(inputs.device)
    connected = {name: network.get_submodule(name) for name, part in partitions.items() if part.is_connected}
    targets = replace_layers(network, backend, inputs, dtype, is_whole=False, fusions=fusions)
    return Model(network, backend, inputs, info, targets, lambda: connect_ranks(network, connected, partitions, group))
