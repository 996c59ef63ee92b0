"""Finds the modules of a network that adapters can change, before the layer pass replaces them.

Names are those of transformers' network: adapters name their targets by them.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.kernels.packing import PackedMatrix
from lorikeet.shard.model.lora.targets import (
    ExpertTargets,
    LoraTarget,
    Product,
    Shrunk,
    adapt,
    adapt_embedding,
    adapt_output,
    begin,
)
from lorikeet.shard.model.moe.experts import is_experts, up_name
from lorikeet.shard.model.moe.routers import is_router
from lorikeet.shard.model.quantization.layers import is_quantized, matrix_of

Target = LoraTarget | ExpertTargets


def mark_targets(network: nn.Module, inputs: StepInputs, dtype: torch.dtype) -> dict[str, Target]:
    """Make a target for each linear, Conv1D, embedding and router of experts, its `lorikeet_adapter`. Returns them by
    module name.
    """
    targets: dict[str, Target] = {}
    output = getattr(network, "get_output_embeddings", lambda: None)()
    for name, module in network.named_modules():
        if is_experts(module):
            targets |= _mark_experts(name, module, inputs)
        if is_router(module):
            num_experts, num_in = module.weight.shape
            targets[name] = module.lorikeet_adapter = LoraTarget(name, num_in, num_experts, inputs)
        if not isinstance(module, nn.Linear | Conv1D | nn.Embedding) and not is_quantized(module):
            continue
        num_out, num_in = _shape(module)
        target = LoraTarget(name, num_in, num_out, inputs, is_head=module is output)
        if isinstance(module, nn.Embedding):
            target.is_embedding = True
        else:
            bias = module.bias
            target.base_bias = None if bias is None else bias.detach().float().clone()
            known = getattr(module, "squared_norms", None)  # of weights that are read only once
            if known is None:
                known = torch.cat([squared_norms(rows) for rows in _parts(module, dtype)])
            target.squared_norms = known
        target.partition = getattr(module, "lorikeet_partition", None)
        module.lorikeet_adapter = target
        targets[name] = target
    return targets


def _shape(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a module. Embeddings and Conv1D keep their weight as [in, out]."""
    if is_quantized(module):
        return int(module.out_features), int(module.in_features)
    first, second = module.weight.shape
    return (second, first) if isinstance(module, Conv1D | nn.Embedding) else (first, second)


def _parts(module: Any, dtype: torch.dtype) -> Iterable[torch.Tensor]:
    """A module's weight in parts of [rows, in], each dequantised temporarily if it is quantised."""
    if is_quantized(module):
        return matrix_of(module, dtype).dense_parts()
    weight = module.weight.detach()
    return [weight.t() if isinstance(module, Conv1D) else weight]


def _mark_experts(name: str, block: Any, inputs: StepInputs) -> dict[str, ExpertTargets]:
    """The targets of a block's parameters, by name; `lorikeet_adapters` holds them by parameter."""
    block.lorikeet_adapters = {}
    for parameter in (up_name(block), "down_proj"):
        shape = getattr(block, parameter).shape
        num_experts, num_out, num_in = (shape[0], shape[2], shape[1]) if block.is_transposed else shape
        targets = ExpertTargets(f"{name}.{parameter}", num_experts, num_in, num_out, inputs)
        for target in targets.experts:
            target.partition = getattr(block, "lorikeet_partitions", {}).get(parameter)
        block.lorikeet_adapters[parameter] = targets
    return {target.name: target for target in block.lorikeet_adapters.values()}


def mark_norms(network: nn.Module, inputs: StepInputs) -> dict[str, LoraTarget]:
    """Make a target for each norm over the hidden state, its `lorikeet_adapter`. Returns them by module name. None of a
    network without an output head: its norms may be parts of other modules.
    """
    output = getattr(network, "get_output_embeddings", lambda: None)()
    targets: dict[str, LoraTarget] = {}
    if not isinstance(output, nn.Module):
        return targets
    width = _shape(output)[1]
    for name, module in network.named_modules():
        parent, weight = name.rpartition(".")[0].rpartition(".")[2], getattr(module, "weight", None)
        if "norm" not in type(module).__name__.lower() or "att" in parent or not isinstance(weight, torch.Tensor):
            continue
        if weight.shape != (width,):
            continue
        target = targets[name] = module.lorikeet_adapter = LoraTarget(name, width, width, inputs)
        target.is_norm = True
        bias = getattr(module, "bias", None)
        target.base_bias = None if bias is None else bias.detach().float().clone()
    return targets


def target_of(module: nn.Module) -> LoraTarget | None:
    """The target that `mark_targets` made for a module."""
    return getattr(module, "lorikeet_adapter", None)


def hook_plain(network: nn.Module) -> None:
    """Add adapters to the outputs of modules that the layer pass did not replace."""
    for module in network.modules():
        target = target_of(module)
        if target is None:
            continue
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_after_embedding)
        elif isinstance(module, nn.Linear | Conv1D):
            target.project = target.project or partial(_project, module)
            hooks = _LinearHooks(target)
            module.register_forward_pre_hook(hooks.before)
            module.register_forward_hook(hooks.after)
        elif target.is_norm:
            module.register_forward_hook(_after_norm)


def squared_norms(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out, in]. Returns [out] float32, in blocks of rows: no second copy of a large weight."""
    return torch.cat([rows.float().square().sum(1) for rows in weight.split(1024)])


class _LinearHooks:
    """Adds a target's adapters to the output of its module."""

    def __init__(self, target: LoraTarget) -> None:
        self._target = target
        self._shrunk: Shrunk | None = None

    def before(self, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._shrunk = begin([self._target], args[0])

    def after(self, _module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        shrunk, self._shrunk = self._shrunk, None
        adapt_output(self._target, args[0], output, shrunk)


def _after_norm(module: nn.Module, _args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    if (target := target_of(module)) is not None:
        target.adapt_norm(output)


def _after_embedding(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    target = target_of(module)
    if target is not None and len(rows := target.rows):
        y = output.view(-1, target.num_out)
        adapt_embedding(rows, target, args[0].reshape(-1), y)
        target.replace_virtual(y)


def _project(module: nn.Linear | Conv1D, x: torch.Tensor) -> torch.Tensor:
    """`x Wᵀ` of a plain module. x: [rows, in]. Returns [rows, out]."""
    return x @ (module.weight.t() if isinstance(module, nn.Linear) else module.weight)


class PackedLinear(nn.Module):
    """`y = x Wᵀ + bias` with a packed weight, or one that modules share, and its adapters."""

    def __init__(self, matrix: PackedMatrix, adapters: LoraTarget | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.out_features, matrix.in_features
        self.matrix = matrix
        self.adapters = adapters
        if adapters is not None:
            adapters.project = self.matrix.project

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Returns [..., out]."""
        shrunk = None if self.adapters is None else begin([self.adapters], x)
        y = self.matrix(x)
        if self.adapters is not None:
            adapt_output(self.adapters, x, y, shrunk)
        return y


class FusedTargets:
    """Modules of the base whose outputs are columns of one product, each with its adapters."""

    def __init__(self, matrix: PackedMatrix, targets: Sequence[LoraTarget | None]) -> None:
        """`matrix` computes their outputs, in order. Unless each has a target, none is adapted."""
        self.targets = [target for target in targets if target is not None] if None not in targets else []
        first = 0
        for target in self.targets:
            target.project = partial(_project_columns, matrix, slice(first, first + target.num_out))
            first += target.num_out

    @property
    def is_active(self) -> bool:
        """Whether a row of the current step belongs to an adapter."""
        return bool(self.targets) and len(self.targets[0].rows) > 0

    def begin(self, x: torch.Tensor) -> Shrunk | None:
        """Multiply by A for all targets, as `targets.begin` does. x: [rows, in]."""
        return begin(self.targets, x)

    def adapt(self, x: torch.Tensor, y: torch.Tensor, shrunk: Shrunk | None = None) -> None:
        """x: [rows, in]; y: [rows, out of all], changed in place; shrunk: what `begin` returned for x."""
        if not self.is_active:
            return
        rows = self.targets[0].rows
        parts = y.split([target.num_out for target in self.targets], dim=1)
        adapt(
            rows, *(Product(target, x, part) for target, part in zip(self.targets, parts, strict=True)), shrunk=shrunk
        )


def _project_columns(matrix: PackedMatrix, columns: slice, x: torch.Tensor) -> torch.Tensor:
    """`x Wᵀ` for a range of a matrix's outputs. x: [rows, in]. Returns [rows, outputs]."""
    return matrix.project(x)[:, columns]
