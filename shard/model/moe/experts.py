"""Mixtures of experts: transformers' expert blocks call one registered function, which finds our experts.

Packed ones, on CPU, are here; others are in experts_device.py. Each expert multiplies its own tokens, sorted by expert;
each token then sums its experts in the router's order, so a token's bits do not depend on its neighbours.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from lorikeet.shard.batch.inputs import NO_ADAPTERS, AdapterRows, rows_of
from lorikeet.shard.model.kernels.packing import PackedMatrix, pack
from lorikeet.shard.model.lora.targets import ExpertTargets, Product, adapt

NAME = "lorikeet"


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is an expert block that dispatches through transformers' experts interface."""
    return isinstance(getattr(module, "down_proj", None), nn.Parameter) and hasattr(module, "_apply_gate")


def check_served(block: Any) -> None:
    """Raises ValueError for what we do not compute."""
    if block.has_post_expert_norm or block._is_expert_parallel:
        raise ValueError(f"{type(block).__name__}: experts with a norm of their own are not served")


class PackedExperts(nn.Module):
    """The packed matrices of one block's experts; takes them from `block`, which keeps its gate function only."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        check_served(block)
        names = up_name(block), "down_proj"
        self.up, self.down = (self._take(block, name) for name in names)
        targets: dict[str, ExpertTargets] = getattr(block, "lorikeet_adapters", {})
        self.up_adapters, self.down_adapters = (targets.get(name) for name in names)

    @staticmethod
    def _take(block: Any, name: str) -> list[PackedMatrix]:
        """Pack one matrix per expert and drop the block's own tensor."""
        matrices: torch.Tensor = getattr(block, name).detach()
        # [experts, out] or None
        biases: torch.Tensor | None = getattr(block, f"{name}_bias", None)
        packed = [
            pack(matrix.t() if block.is_transposed else matrix, None if biases is None else biases[expert].detach())
            for expert, matrix in enumerate(matrices)
        ]
        delattr(block, name)
        return packed

    def forward(self, block: Any, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [T, H]; expert_ids, weights: [T, experts per token]. Returns [T, H]."""
        num_chosen = expert_ids.shape[1]
        # [T * experts per token] pairs sorted by expert
        order = expert_ids.flatten().argsort(stable=True)
        counts = torch.bincount(expert_ids.flatten(), minlength=len(self.up)).tolist()
        pairs = x[order // num_chosen]
        up_rows = self._rows(self.up_adapters, x.shape[0], order // num_chosen)
        down_rows = self._rows(self.down_adapters, x.shape[0], order // num_chosen)
        results = pairs.new_empty(pairs.shape[0], x.shape[1])
        first = 0
        for expert, count in enumerate(counts):
            if count:
                span = slice(first, first + count)
                adapters = (_runs(up_rows, span), _runs(down_rows, span))
                results[span] = self._one(block, expert, pairs[span], adapters)
                first += count
        # [T, experts per token, H] back in the router's order
        unsorted = torch.empty_like(results).index_copy_(0, order, results).view(x.shape[0], num_chosen, -1)
        return (unsorted * weights[..., None]).sum(1).to(x.dtype)

    @staticmethod
    def _rows(targets: ExpertTargets | None, num_rows: int, tokens: torch.Tensor) -> npt.NDArray[np.int32] | None:
        """[pairs] the adapter's slot of each pair; None when no adapter of the step changes these experts."""
        slots = None if targets is None else targets.slots_of(num_rows)
        return None if slots is None else slots[tokens.numpy()]

    def _one(self, block: Any, expert: int, x: torch.Tensor, adapters: tuple[AdapterRows, AdapterRows]) -> torch.Tensor:
        """One expert's tokens: [rows, H]. A single row is doubled, for bits are equal from two rows on.

        `adapters`: which of the rows belong to adapters that change the first and the second product.
        """
        rows = x if x.shape[0] > 1 else x.expand(2, -1).contiguous()
        hidden = self.up[expert](rows)
        if self.up_adapters is not None:
            adapt(adapters[0], Product(self.up_adapters.experts[expert], rows, hidden))
        hidden = block._apply_gate(hidden) if block.has_gate else block.act_fn(hidden)
        output = self.down[expert](hidden)
        if self.down_adapters is not None:
            adapt(adapters[1], Product(self.down_adapters.experts[expert], hidden, output))
        return output[: x.shape[0]]


def up_name(block: Any) -> str:
    """The parameter of the first product."""
    return "gate_up_proj" if block.has_gate else "up_proj"


def _runs(slots: npt.NDArray[np.int32] | None, span: slice) -> AdapterRows:
    """Which rows of a span belong to which slot."""
    return NO_ADAPTERS if slots is None else rows_of(slots[span].tolist())


def compute_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function that transformers' expert blocks call by name."""
    experts: Callable[..., torch.Tensor] = module.lorikeet_experts  # type: ignore[assignment]
    return experts(module, hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(NAME, compute_experts)
