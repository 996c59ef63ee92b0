"""A step in which requests have adapters of one module: the kernels of shard/model/lora/triton.py, grouped torch
products, and the specification row by row.
"""

from dataclasses import dataclass

import numpy as np
import torch

from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model.kernels import tuning
from lorikeet.shard.model.lora.targets import LoraTarget, Product, SlotWeights, adapt, adapt_row


@dataclass(frozen=True)
class Size:
    """One module and one step."""

    num_in: int
    num_out: int
    rank: int
    num_requests: int
    num_tokens: int
    """Tokens of each request."""


class Case:
    """A step in which each request has an adapter of a mix."""

    def __init__(
        self,
        size: Size,
        mix: str,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        tuned: tuning.Tuned | None = None,
    ) -> None:
        """`tuned`: how the kernels are cut up, what is read for this device if None."""
        from lorikeet.shard.model.adapters.tables import DeviceKernels

        generator = torch.Generator(device).manual_seed(0)
        num_rows = size.num_requests * size.num_tokens
        self.inputs = StepInputs(16, device)
        self.inputs.reserve_groups(num_rows, size.num_requests)
        self.site = LoraTarget("module", size.num_in, size.num_out, self.inputs)
        self.site.allocate(size.num_requests)
        tuned = tuning.read(device) if tuned is None else tuned
        kernels = DeviceKernels([self.site], size.num_requests, device, tuned)
        self.weights: list[SlotWeights] = []
        self.memories: list[torch.Tensor] = []
        for slot in range(size.num_requests):
            num_a = size.rank * size.num_in
            num_values = num_a + size.rank * size.num_out
            values = torch.randn(num_values, generator=generator, device=device).div_(64).to(dtype)
            memory = values.view(torch.uint8)
            a, b = values[:num_a].view(size.rank, -1), values[num_a:].view(size.rank, -1)
            weights = SlotWeights(a, b)
            entries = np.array([[size.rank, 0, a.nbytes, -1, -1]])
            kernels.bind(slot, kernels.image([self.site], entries), memory)
            self.weights.append(weights)
            self.memories.append(memory)
        self.slots = choose(mix, size.num_requests)
        segments = [Segment(0, size.num_tokens, range(num_rows), slot) for slot in self.slots]
        self.inputs.fill(segments, torch.zeros(num_rows, dtype=torch.long, device=device), torch.arange(1), [0])
        self.x, self.y = (
            torch.randn(num_rows, width, generator=generator, device=device).to(dtype)
            for width in (size.num_in, size.num_out)
        )
        row_slots = torch.tensor(np.repeat(self.slots, size.num_tokens))
        # (slot, its rows) of each adapter
        self.owners = [(slot, (row_slots == slot).nonzero()[:, 0].to(device)) for slot in sorted(set(self.slots))]
        self.stacked: tuple[torch.Tensor, ...] | None = None
        """Rows, [adapters, rank, in] and [adapters, rank, out], if each adapter has as many rows."""
        if len({len(rows) for _, rows in self.owners}) == 1:
            factors = [self.weights[slot].tensors for slot, _ in self.owners]
            stacks = (torch.stack([slot_factors[name] for slot_factors in factors]) for name in ("a", "b"))
            self.stacked = (torch.stack([rows for _, rows in self.owners]), *stacks)

    def kernels(self, y: torch.Tensor) -> None:
        adapt(self.inputs.adapter_rows, Product(self.site, self.x, y))

    def grouped(self, y: torch.Tensor) -> None:
        """Two products per adapter over its rows gathered, in one torch.bmm if each has as many rows."""
        if self.stacked is not None:
            rows, a, b = self.stacked
            y[rows] += torch.bmm(torch.bmm(self.x[rows], a.transpose(1, 2)), b)
            return
        for slot, rows in self.owners:
            weights = self.weights[slot]
            assert weights.a is not None and weights.b is not None
            y[rows] += self.x[rows] @ weights.a.t() @ weights.b

    def by_row(self, y: torch.Tensor) -> None:
        for slot, rows in self.owners:
            for row in rows.tolist():
                adapt_row(self.weights[slot], None, self.x[row], y[row])


def choose(mix: str, num_requests: int) -> list[int]:
    """The slot of each request. mix: `distinct`, `identical` or `zipf`."""
    if mix == "distinct":
        return list(range(num_requests))
    if mix == "identical":
        return [0] * num_requests
    return np.minimum(np.random.default_rng(0).zipf(1.5, num_requests) - 1, num_requests - 1).tolist()
