"""Tensor parallel: takes a loaded network down to one rank's part of it, by the plan that transformers has for it.

The plan is read as data; transformers' own hooks and tensors are not used (Shoeybi et al. 2019 for the layout).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lorikeet.shard.model.lora.partition import Partition
from lorikeet.shard.model.moe.experts import is_experts, up_name
from lorikeet.shard.model.tensor_parallel.collectives import Joint
from lorikeet.shard.model.tensor_parallel.group import Group

_WHOLE = frozenset(("replicated_with_grad_allreduce",))
_EXPERTS = "moe_tp_experts"
_ROWS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""Kinds of the plan by which ranks hold rows of a weight, and whether everybody needs the whole output."""
_COLUMNS = {"rowwise": False, "rowwise_split_input": True}
"""Kinds by which they hold columns, and whether the input is whole."""


class TensorParallelUnsupported(ValueError):
    """Why an architecture cannot be split, in a sentence that names it."""


def partition_network(network: nn.Module, text_config: Any, group: Group) -> dict[str, Partition]:
    """Leave of every module what this rank holds. Returns how modules were cut, by name.

    Raises TensorParallelUnsupported where it has no plan or does not divide.
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
        # out of the file before the head becomes a view of it: what is copied later would be so twice
        embeddings.weight.data = embeddings.weight.data.clone()
    cuts: dict[str, Partition] = {}
    for name, module in network.named_modules():
        wanted = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if wanted is None or wanted in _WHOLE:
            continue
        if module is output and module.out_features % group.size:
            continue  # a vocabulary of any size: everybody computes all of it
        try:
            cuts[name] = _cut(module, wanted, group)
        except ValueError as error:
            raise TensorParallelUnsupported(f"cannot split {kind}: {name}: {error}") from None
    if not cuts:
        raise TensorParallelUnsupported(f"cannot split {kind}: no module of it is in its tensor parallel plan")
    return cuts


def plan_of(network: Any) -> dict[str, str]:
    """Kinds by pattern of module names, `*` for numbers."""
    prefix = network.base_model_prefix
    of_base: Mapping[str, str] = getattr(network.config.get_text_config(), "base_model_tp_plan", None) or {}
    own: Mapping[str, str] = getattr(type(network), "_tp_plan", None) or {}
    return {f"{prefix}.{pattern}": kind for pattern, kind in of_base.items()} | dict(own)


def join(network: nn.Module, cuts: Mapping[str, Partition], group: Group) -> None:
    """Let cut modules give what the whole ones would. To be called after everything else that changes outputs."""
    joint = Joint(group)
    for name, cut in cuts.items():
        module = network.get_submodule(name)
        if cut.is_split:
            module.register_forward_pre_hook(_Split(cut))
        if cut.is_row_parallel:
            module.register_forward_hook(lambda _module, _args, y: joint.sum(y))
        elif cut.is_gathered:
            module.register_forward_hook(lambda _module, _args, y: joint.gather(y))


class _Split:
    """Takes a rank's part of a whole input."""

    def __init__(self, cut: Partition) -> None:
        self._columns = cut.columns

    def __call__(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0][..., self._columns].contiguous(), *args[1:])


def _cut(module: nn.Module, kind: str, group: Group) -> Partition:
    """Raises ValueError where that cannot be."""
    if is_experts(module) and kind == _EXPERTS:
        return _partition_experts(module, group)
    if not isinstance(module, nn.Linear) or kind not in _ROWS | _COLUMNS:
        raise ValueError(f"split {kind} it is not served")
    return _partition_linear(module, kind, group)


def _partition_linear(module: Any, kind: str, group: Group) -> Partition:
    num_out, num_in = module.weight.shape
    gathered, split = _ROWS.get(kind, False), _COLUMNS.get(kind, False)
    cut = Partition(group.rank, group.size, num_out, num_in, kind in _COLUMNS, gathered, split)
    module.weight = _parameter(cut.of_weight(module.weight.detach()))
    module.out_features, module.in_features = module.weight.shape
    if module.bias is not None:
        bias = cut.of_bias(module.bias.detach())
        module.bias = None if bias is None else _parameter(bias)
    module.lorikeet_partition = cut
    return cut


def _partition_experts(block: Any, group: Group) -> Partition:
    """Every rank has a part of every expert: rows of the first product, columns of the second."""
    if block.is_transposed:
        raise ValueError("experts whose matrices are transposed are not split")
    cuts: dict[str, Partition] = {}
    for name in (up_name(block), "down_proj"):
        # [experts, out, in]
        weight = getattr(block, name).detach()
        num_out, num_in = weight.shape[1:]
        is_row_parallel = name == "down_proj"
        num_stacked = 2 if block.has_gate and not is_row_parallel else 1
        cuts[name] = cut = Partition(group.rank, group.size, num_out, num_in, is_row_parallel, num_stacked=num_stacked)
        setattr(block, name, _parameter(cut.of_weight(weight)))
        bias = getattr(block, f"{name}_bias", None)
        if bias is not None:
            own = cut.of_bias(bias.detach())
            setattr(block, f"{name}_bias", None if own is None else _parameter(own))
    block.lorikeet_partitions = cuts
    return cuts["down_proj"]


def _parameter(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
