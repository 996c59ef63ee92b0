"""Mixtures of experts whose weights lie as transformers has them: on devices, and on CPU in what is not packed.

Pairs of token and expert are sorted on the device, and nothing of them is read on the host, so that a step can be
captured in a graph. Each token sums its experts in the router's order.
"""

from typing import Any

import torch
from torch import nn

from shard.model.expert_pairs import SortedPairs, sort_pairs
from shard.model.experts import check_served, is_experts, up_name
from shard.model.grouped import multiply_grouped
from shard.model.lora import ExpertSites


class DeviceExperts(nn.Module):
    """What computes one block's experts from the block's own parameters."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        check_served(block)
        self.names = up_name(block), "down_proj"
        sites: dict[str, ExpertSites] = getattr(block, "lorikeet_adapters", {})
        self.sites = {name: sites[name] for name in self.names if name in sites}

    def forward(self, block: Any, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [T, H]; expert_ids, weights: [T, experts per token]. Returns [T, H]."""
        up, down = self.names
        pairs = sort_pairs(expert_ids, getattr(block, down).shape[0])
        hidden = self._multiply(block, up, x[pairs.order // expert_ids.shape[1]], pairs)
        hidden = block._apply_gate(hidden) if block.has_gate else block.act_fn(hidden)
        results = self._multiply(block, down, hidden, pairs)
        # [T, experts per token, H]
        unsorted = pairs.unsort(results).view(*expert_ids.shape, -1)
        return (unsorted * weights[..., None]).sum(1).to(x.dtype)

    def _multiply(self, block: Any, name: str, x: torch.Tensor, pairs: SortedPairs) -> torch.Tensor:
        """x: [P, in]. Returns [P, out]."""
        matrices = getattr(block, name)
        return multiply_grouped(
            x, matrices if block.is_transposed else matrices.mT, getattr(block, f"{name}_bias", None), pairs
        )


def place_experts(network: nn.Module) -> None:
    """Let every block of experts that has its own weights still be computed from them."""
    for module in list(network.modules()):
        if is_experts(module):
            module.lorikeet_experts = DeviceExperts(module)
