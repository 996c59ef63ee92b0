"""Finds the modules of a network that adapters can change, before the layer pass takes them apart.

Names are those of transformers' own network, by which adapters name their targets.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.kernels.packing import PackedMatrix
from lorikeet.shard.model.lora.targets import ExpertTargets, LoraTarget, Product, adapt, adapt_embedding, adapt_output
from lorikeet.shard.model.moe.experts import is_experts, up_name
from lorikeet.shard.model.quantization.layers import is_quantized, matrix_of

Target = LoraTarget | ExpertTargets


def mark_targets(network: nn.Module, inputs: StepInputs, dtype: torch.dtype) -> dict[str, Target]:
    """Give each linear, Conv1D and embedding its site as `lorikeet_adapter`. Returns them by module name."""
    targets: dict[str, Target] = {}
    output = getattr(network, "get_output_embeddings", lambda: None)()
    for name, module in network.named_modules():
        if is_experts(module):
            targets |= _mark_experts(name, module, inputs)
        if not isinstance(module, nn.Linear | Conv1D | nn.Embedding) and not is_quantized(module):
            continue
        weight = _dense(module, dtype)
        is_upright = not isinstance(module, Conv1D | nn.Embedding)
        num_out, num_in = weight.shape if is_upright else weight.shape[::-1]
        site = LoraTarget(name, num_in, num_out, inputs, is_head=module is output)
        if isinstance(module, nn.Embedding):
            site.is_embedding = True
        else:
            bias = module.bias
            site.base_bias = None if bias is None else bias.detach().float().clone()
            site.squared_norms = squared_norms(weight if is_upright else weight.t())
        site.cut = getattr(module, "lorikeet_partition", None)
        module.lorikeet_adapter = site
        targets[name] = site
    return targets


def _dense(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """A module's weight, as it lies there; made for the moment where it is quantised."""
    weight: torch.Tensor = matrix_of(module, dtype).dense() if is_quantized(module) else module.weight.detach()
    return weight


def _mark_experts(name: str, block: Any, inputs: StepInputs) -> dict[str, ExpertTargets]:
    """The sites of a block's parameters, by name; `lorikeet_adapters` has them by parameter."""
    block.lorikeet_adapters = {}
    for parameter in (up_name(block), "down_proj"):
        shape = getattr(block, parameter).shape
        num_experts, num_out, num_in = (shape[0], shape[2], shape[1]) if block.is_transposed else shape
        targets = ExpertTargets(f"{name}.{parameter}", num_experts, num_in, num_out, inputs)
        for site in targets.experts:
            site.cut = getattr(block, "lorikeet_partitions", {}).get(parameter)
        block.lorikeet_adapters[parameter] = targets
    return {site.name: site for site in block.lorikeet_adapters.values()}


def target_of(module: nn.Module) -> LoraTarget | None:
    """The site that `mark_targets` gave a module."""
    return getattr(module, "lorikeet_adapter", None)


def hook_plain(network: nn.Module) -> None:
    """Let what the layer pass left as it was add its adapters' part to its output."""
    for module in network.modules():
        site = target_of(module)
        if site is None:
            continue
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_after_embedding)
        elif isinstance(module, nn.Linear | Conv1D):
            site.project = site.project or Projection(module)
            module.register_forward_hook(_after_linear)


def squared_norms(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out, in]. Returns [out] float32, a block of rows at a time: no second copy of a large weight."""
    return torch.cat([rows.float().square().sum(1) for rows in weight.split(1024)])


def _after_linear(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    site = target_of(module)
    if site is not None:
        adapt_output(site, args[0], output)


def _after_embedding(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    site = target_of(module)
    if site is not None and len(rows := site.rows):
        adapt_embedding(rows, site, args[0].reshape(-1), output.view(-1, site.num_out))


class Projection:
    """`x Wᵀ` of a plain module."""

    def __init__(self, module: nn.Linear | Conv1D) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        weight = self._module.weight
        return x @ (weight.t() if isinstance(self._module, nn.Linear) else weight)


class PackedLinear(nn.Module):
    """`y = x Wᵀ + bias` with a packed weight that it alone owns, or one that is shared."""

    def __init__(self, matrix: PackedMatrix, adapters: LoraTarget | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.out_features, matrix.in_features
        self.matrix = matrix
        self.adapters = adapters
        if adapters is not None:
            adapters.project = self.matrix.project

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Returns [..., out]."""
        y = self.matrix(x)
        if self.adapters is not None:
            adapt_output(self.adapters, x, y)
        return y


class FusedTargets:
    """Modules of the base whose outputs lie side by side in one product, each with its own adapters."""

    def __init__(self, matrix: PackedMatrix, targets: Sequence[LoraTarget | None]) -> None:
        """`matrix` computes the outputs of all of them, in order. Without a site for each there is nothing to do."""
        self.targets = [site for site in targets if site is not None] if None not in targets else []
        first = 0
        for site in self.targets:
            site.project = Columns(matrix, first, first + site.num_out)
            first += site.num_out

    @property
    def is_active(self) -> bool:
        """Whether a row of the step at hand belongs to an adapter."""
        return bool(self.targets) and len(self.targets[0].rows) > 0

    def adapt(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """x: [rows, in]; y: [rows, out of all], changed in place."""
        if not self.is_active:
            return
        rows = self.targets[0].rows
        parts = y.split([site.num_out for site in self.targets], dim=1)
        adapt(rows, *(Product(site, x, part) for site, part in zip(self.targets, parts, strict=True)))


class Columns:
    """`x Wᵀ` of some of a matrix's outputs."""

    def __init__(self, matrix: PackedMatrix, first: int, end: int) -> None:
        self._matrix, self._first, self._end = matrix, first, end

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in]. Returns [rows, end - first]."""
        return self._matrix.project(x)[:, self._first : self._end]
