"""Mixtures of experts whose weights lie as transformers has them: on devices, and on CPU in what is not packed.

Pairs of token and expert are sorted on the device, and nothing of them is read on the host, so that a step can be
captured in a graph. Each token sums its experts in the router's order.
"""

from itertools import groupby
from typing import Any

import torch
from torch import nn

from lorikeet.shard.batch.inputs import AdapterRows
from lorikeet.shard.model.kernels.grouped import multiply_grouped
from lorikeet.shard.model.kernels.pairs import PairTasks, SortedPairs, sort_pairs
from lorikeet.shard.model.lora.targets import ExpertTargets, Product, adapt
from lorikeet.shard.model.moe.experts import check_served, is_experts, up_name


class DeviceExperts(nn.Module):
    """What computes one block's experts from the block's own parameters."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        check_served(block)
        self.names = up_name(block), "down_proj"
        # sites of the parameters; none where nobody looked for any
        self.targets: dict[str, ExpertTargets] = getattr(block, "lorikeet_adapters", {})

    def forward(self, block: Any, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [T, H]; expert_ids, weights: [T, experts per token]. Returns [T, H]."""
        up, down = self.names
        slots, num_slots = self._slots(x)
        pairs = sort_pairs(expert_ids, getattr(block, down).shape[0], slots, num_slots)
        tasks = self._tasks(pairs)
        hidden = self._multiply(block, up, x[pairs.order // expert_ids.shape[1]], pairs, tasks)
        hidden = block._apply_gate(hidden) if block.has_gate else block.act_fn(hidden)
        results = self._multiply(block, down, hidden, pairs, tasks)
        # [T, experts per token, H]
        unsorted = pairs.unsort(results).view(*expert_ids.shape, -1)
        return (unsorted * weights[..., None]).sum(1).to(x.dtype)

    def _slots(self, x: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        """[T] int32 the slot of each row of x, -1 for none, and how many slots there are; None and 0 where no adapter
        of the step changes these experts.
        """
        changed = next((targets for targets in self.targets.values() if targets.is_modified), None)
        if changed is None:
            return None, 0
        if changed.kernels is not None:
            return changed.kernels.pair_slots(changed.rows, x.shape[0])
        slots = changed.slots_of(x.shape[0])
        assert slots is not None
        return torch.from_numpy(slots).to(x.device), len(changed.experts[0].slots)

    def _tasks(self, pairs: SortedPairs) -> PairTasks | None:
        """What the device's kernels are to compute; None where there are no adapters or no kernels."""
        kernels = next((targets.kernels for targets in self.targets.values()), None)
        return None if kernels is None or not pairs.num_slots else kernels.pair_tasks(pairs)

    def _multiply(
        self, block: Any, name: str, x: torch.Tensor, pairs: SortedPairs, tasks: PairTasks | None
    ) -> torch.Tensor:
        """x: [P, in]. Returns [P, out], with what adapters add."""
        matrices = getattr(block, name)
        matrices = matrices if block.is_transposed else matrices.mT
        y = multiply_grouped(x, matrices, getattr(block, f"{name}_bias", None), pairs)
        if not pairs.num_slots:
            return y
        targets = self.targets[name]
        if targets.kernels is not None and tasks is not None:
            targets.kernels.adapt_pairs(tasks, targets, x, y)
        else:
            adapt_pairs(targets, pairs, x, y)
        return y


def adapt_pairs(targets: ExpertTargets, pairs: SortedPairs, x: torch.Tensor, y: torch.Tensor) -> None:
    """On CPU, run by run. x: [P, in], y: [P, out] of sorted pairs, y changed in place."""
    first = 0
    for (expert, slot), run in groupby(zip(pairs.experts.tolist(), pairs.slots.tolist(), strict=True)):
        end = first + len(list(run))
        adapt(AdapterRows([slot], [end - first]), Product(targets.experts[expert], x[first:end], y[first:end]))
        first = end


def place_experts(network: nn.Module) -> None:
    """Let every block of experts that has its own weights still be computed from them."""
    for module in list(network.modules()):
        if is_experts(module):
            module.lorikeet_experts = DeviceExperts(module)
