"""Mixtures of experts: transformers' expert blocks call one registered function, which finds our experts.

Pairs of token and expert are sorted by expert; each token then sums its experts in the router's order, so its bits do
not depend on its neighbours. On a device nothing is read on the host, so that a step can be captured in a graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from lorikeet.shard.batch.row_groups import AdapterRows
from lorikeet.shard.model.kernels.grouped import multiply_grouped
from lorikeet.shard.model.kernels.packing import PackedMatrix, pack
from lorikeet.shard.model.kernels.pairs import PairTasks, SortedPairs, sort_pairs
from lorikeet.shard.model.lora.targets import ExpertTargets, Product, adapt

NAME = "lorikeet"
Pack = Callable[[torch.Tensor, torch.Tensor | None], PackedMatrix]
"""Packs a weight [out, in] and a bias [out]."""


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is an expert block that dispatches through transformers' experts interface."""
    return isinstance(getattr(module, "down_proj", None), nn.Parameter) and hasattr(module, "_apply_gate")


class Experts(nn.Module):
    """Computes one block's experts from the block's parameters."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        # transformers 5.17 has neither attribute
        if getattr(block, "has_post_expert_norm", False) or getattr(block, "_is_expert_parallel", False):
            raise ValueError(f"{type(block).__name__}: experts with a norm are not served")
        self.num_experts = block.down_proj.shape[0]
        # targets of the parameters, if marked
        self.targets: dict[str, ExpertTargets] = getattr(block, "lorikeet_adapters", {})

    def forward(self, block: Any, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [T, H]; expert_ids, weights: [T, experts per token]. Returns [T, H]."""
        pairs = sort_pairs(expert_ids, self.num_experts, *self._slots(x))
        kernels = next((targets.kernels for targets in self.targets.values()), None)
        tasks = None if kernels is None or not pairs.num_slots else kernels.pair_tasks(pairs)
        hidden = self._adapted(block, up_name(block), x[pairs.order // expert_ids.shape[1]], pairs, tasks)
        hidden = block._apply_gate(hidden) if block.has_gate else block.act_fn(hidden)
        results = self._adapted(block, "down_proj", hidden, pairs, tasks)
        # [T, experts per token, H]
        unsorted = pairs.unsort(results).view(*expert_ids.shape, -1)
        return (unsorted * weights[..., None]).sum(1).to(x.dtype)

    def multiply(self, block: Any, name: str, x: torch.Tensor, pairs: SortedPairs) -> torch.Tensor:
        """x: [P, in] as the pairs are sorted. Returns [P, out]."""
        matrices = getattr(block, name)
        matrices = matrices if block.is_transposed else matrices.mT
        return multiply_grouped(x, matrices, getattr(block, f"{name}_bias", None), pairs)

    def _slots(self, x: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        """[T] int32 the slot of each row of x, -1 for none, and the number of slots; None and 0 where no adapter of the
        step changes these experts.
        """
        changed = next((targets for targets in self.targets.values() if targets.is_modified), None)
        if changed is None:
            return None, 0
        if changed.kernels is not None:
            return changed.kernels.pair_slots(changed.rows, x.shape[0])
        return torch.from_numpy(changed.slots_of(x.shape[0])).to(x.device), len(changed.experts[0].slots)

    def _adapted(
        self, block: Any, name: str, x: torch.Tensor, pairs: SortedPairs, tasks: PairTasks | None
    ) -> torch.Tensor:
        """x: [P, in]. Returns [P, out], adapters included."""
        y = self.multiply(block, name, x, pairs)
        if pairs.num_slots:
            targets = self.targets[name]
            if targets.kernels is not None and tasks is not None:
                targets.kernels.adapt_pairs(tasks, targets, x, y)
            else:
                slots = pairs.slots.to(torch.int32).numpy()
                for expert, span in pairs.spans():
                    adapt(AdapterRows(slots[span]), Product(targets.experts[expert], x[span], y[span]))
        return y


class PackedExperts(Experts):
    """On CPU: packed matrices, which replace the parameters of `block`."""

    def __init__(self, block: Any, pack_one: Pack = pack) -> None:
        super().__init__(block)
        self.matrices = {name: self._take(block, name, pack_one) for name in (up_name(block), "down_proj")}

    @staticmethod
    def _take(block: Any, name: str, pack_one: Pack) -> list[PackedMatrix]:
        """Pack one matrix per expert and drop the block's tensor."""
        matrices: torch.Tensor = getattr(block, name).detach()
        # [experts, out] or None
        biases: torch.Tensor | None = getattr(block, f"{name}_bias", None)
        packed = [
            pack_one(matrix.t() if block.is_transposed else matrix, None if biases is None else biases[expert].detach())
            for expert, matrix in enumerate(matrices)
        ]
        delattr(block, name)
        return packed

    def multiply(self, block: Any, name: str, x: torch.Tensor, pairs: SortedPairs) -> torch.Tensor:
        """Multiply as `Experts.multiply` does. A single row is computed as two: bits are equal from two rows on."""
        y = x.new_empty(x.shape[0], self.matrices[name][0].out_features)
        for expert, span in pairs.spans():
            rows = x[span] if span.stop - span.start > 1 else x[span].expand(2, -1).contiguous()
            y[span] = self.matrices[name][expert](rows)[: span.stop - span.start]
        return y


def place_experts(network: nn.Module) -> None:
    """Compute every block of experts that is not packed from its parameters."""
    for module in list(network.modules()):
        if is_experts(module):
            module.lorikeet_experts = Experts(module)


def up_name(block: Any) -> str:
    """The parameter of the first product."""
    return "gate_up_proj" if block.has_gate else "up_proj"


def compute_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function that transformers' expert blocks look up by name."""
    experts: Callable[..., torch.Tensor] = module.lorikeet_experts  # type: ignore[assignment]
    return experts(module, hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(NAME, compute_experts)
