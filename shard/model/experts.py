"""Mixtures of experts: transformers' expert blocks call one registered function, which finds our packed experts.

Each expert multiplies its own tokens, sorted by expert; each token then sums its experts in the router's order, so a
token's bits do not depend on its neighbours.
"""

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from shard.model.packing import PackedMatrix, pack

NAME = "lorikeet"


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is an expert block that dispatches through transformers' experts interface."""
    return isinstance(getattr(module, "down_proj", None), nn.Parameter) and hasattr(module, "_apply_gate")


class PackedExperts(nn.Module):
    """The packed matrices of one block's experts; takes them from `block`, which keeps its gate function only."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        if block.has_post_expert_norm or block._is_expert_parallel:
            raise ValueError(f"{type(block).__name__}: experts with a norm of their own are not served")
        self.up = self._take(block, "gate_up_proj" if block.has_gate else "up_proj")
        self.down = self._take(block, "down_proj")

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
        results = pairs.new_empty(pairs.shape[0], x.shape[1])
        first = 0
        for expert, count in enumerate(counts):
            if count:
                results[first : first + count] = self._one(block, expert, pairs[first : first + count])
                first += count
        # [T, experts per token, H] back in the router's order
        unsorted = torch.empty_like(results).index_copy_(0, order, results).view(x.shape[0], num_chosen, -1)
        return (unsorted * weights[..., None]).sum(1).to(x.dtype)

    def _one(self, block: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
        """One expert's tokens: [rows, H]. A single row is doubled, for bits are equal from two rows on."""
        rows = x if x.shape[0] > 1 else x.expand(2, -1)
        hidden = self.up[expert](rows)
        hidden = block._apply_gate(hidden) if block.has_gate else block.act_fn(hidden)
        return self.down[expert](hidden)[: x.shape[0]]


def packed_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function that transformers' expert blocks call by name."""
    experts: PackedExperts = module.lorikeet_experts  # type: ignore[assignment]
    return experts(module, hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(NAME, packed_experts)
