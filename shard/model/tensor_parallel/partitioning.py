"""Tensor parallelism: reduces a loaded network to one rank's part of it, by transformers' plan for it.

The plan is read as data; transformers' hooks and tensors are not used (Shoeybi et al. 2019 for the layout).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lorikeet.shard.model.lora.partition import Partition
from lorikeet.shard.model.moe.experts import is_experts, up_name
from lorikeet.shard.model.tensor_parallel.collectives import Collectives
from lorikeet.shard.model.tensor_parallel.group import Group

_WHOLE = frozenset(("replicated_with_grad_allreduce", "embedding_rowwise"))
_EXPERTS = "moe_tp_experts"
_ROWS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""Kinds of the plan by which ranks hold rows of a weight, and whether every rank needs the whole output."""
_COLUMNS = {"rowwise": False, "rowwise_split_input": True}
"""Kinds by which they hold columns, and whether the input is whole."""


class TensorParallelUnsupported(ValueError):
    """An architecture cannot be split; the message names it and the reason."""


def partition_network(network: nn.Module, text_config: Any, group: Group) -> dict[str, Partition]:
    """Keep this rank's part of every module. Returns the partitions by module name.

    Raises TensorParallelUnsupported without a plan, and for sizes that do not divide.
    """
    kind = text_config.model_type
    plan = plan_of(network)
    if not plan:
        raise TensorParallelUnsupported(f"cannot split {kind}: transformers has no tensor parallel plan for it")
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text_config, name, None)
        if count is not None and count % group.size:
            raise TensorParallelUnsupported(f"cannot split {kind} over {group.size} ranks: its {name} are {count}")
    output: Any = getattr(network, "get_output_embeddings", lambda: None)()
    embeddings: Any = getattr(network, "get_input_embeddings", lambda: None)()
    if output is not None and embeddings is not None and output.weight is embeddings.weight:
        # copy it from the file before the head becomes a view of it: a later copy would copy it twice
        embeddings.weight.data = embeddings.weight.data.clone()
    partitions: dict[str, Partition] = {}
    for name, module in network.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or style in _WHOLE:
            continue
        if module is output and module.out_features % group.size:
            continue  # a vocabulary that does not divide: every rank computes all of it
        try:
            partitions[name] = _partition(module, style, group)
        except ValueError as error:
            raise TensorParallelUnsupported(f"cannot split {kind}: {name}: {error}") from None
    if not partitions:
        raise TensorParallelUnsupported(f"cannot split {kind}: its tensor parallel plan names none of its modules")
    return partitions


def plan_of(network: Any) -> dict[str, str]:
    """Kinds by pattern of module names, `*` for numbers."""
    prefix = network.base_model_prefix
    of_base: Mapping[str, str] = getattr(network.config.get_text_config(), "base_model_tp_plan", None) or {}
    own: Mapping[str, str] = getattr(type(network), "_tp_plan", None) or {}
    return {f"{prefix}.{pattern}": kind for pattern, kind in of_base.items()} | dict(own)


def connect_ranks(
    network: nn.Module, connected: Mapping[str, nn.Module], partitions: Mapping[str, Partition], group: Group
) -> None:
    """Make partitioned modules compute what the whole ones would, after everything else that changes outputs.
    `connected`: those at which ranks exchange something, as they were before layers were replaced. A fused module has
    no part of that name, and computes its output by the same one.
    """
    collectives = Collectives(group)
    named = dict(network.named_modules())
    for name, before in connected.items():
        module, part = named.get(name, before), partitions[name]
        if part.is_split:
            module.register_forward_pre_hook(_Split(part))
        if part.is_row_parallel:
            module.register_forward_hook(lambda _module, _args, y: collectives.sum(y))
        elif part.is_gathered:
            module.register_forward_hook(lambda _module, _args, y: collectives.gather(y))


class _Split:
    """Takes this rank's part of a whole input."""

    def __init__(self, part: Partition) -> None:
        self._columns = part.columns

    def __call__(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0][..., self._columns].contiguous(), *args[1:])


def _partition(module: nn.Module, kind: str, group: Group) -> Partition:
    """Raises ValueError for unsupported kinds and sizes that do not divide."""
    if is_experts(module) and kind == _EXPERTS:
        return _partition_experts(module, group)
    if not isinstance(module, nn.Linear) or kind not in _ROWS | _COLUMNS:
        raise ValueError(f"splitting it {kind} is not supported")
    return _partition_linear(module, kind, group)


def _partition_linear(module: Any, kind: str, group: Group) -> Partition:
    num_out, num_in = module.weight.shape
    gathered, split = _ROWS.get(kind, False), _COLUMNS.get(kind, False)
    part = Partition(group.rank, group.size, num_out, num_in, kind in _COLUMNS, gathered, split)
    module.weight = _parameter(part.of_weight(module.weight.detach()))
    module.out_features, module.in_features = module.weight.shape
    if module.bias is not None:
        bias = part.of_bias(module.bias.detach())
        module.bias = None if bias is None else _parameter(bias)
    module.lorikeet_partition = part
    return part


def _partition_experts(block: Any, group: Group) -> Partition:
    """Every rank holds a part of every expert: rows of the first product, columns of the second."""
    if block.is_transposed:
        raise ValueError("experts with transposed matrices cannot be split")
    partitions: dict[str, Partition] = {}
    for name in (up_name(block), "down_proj"):
        # [experts, out, in]
        weight = getattr(block, name).detach()
        num_out, num_in = weight.shape[1:]
        is_row = name == "down_proj"
        num_stacked = 2 if block.has_gate and not is_row else 1
        partitions[name] = part = Partition(group.rank, group.size, num_out, num_in, is_row, num_stacked=num_stacked)
        setattr(block, name, _parameter(part.of_weight(weight)))
        bias = getattr(block, f"{name}_bias", None)
        if bias is not None:
            own = part.of_bias(bias.detach())
            setattr(block, f"{name}_bias", None if own is None else _parameter(own))
    block.lorikeet_partitions = partitions
    return partitions["down_proj"]


def _parameter(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
