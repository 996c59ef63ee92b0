"""Medusa heads in a step: draft rows are appended to the hidden rows at the output head's input.

A head is a few residual blocks, `x + SiLU(W x + b)`; version 2 then uses the base's output head, version 1 a matrix of
each head (Cai et al. 2024). Draft rows go through the output head with the request's LoRA, as in training. A row's bits
do not depend on its neighbours. adapters/formats/heads.py is the specification.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.model.kernels import cpu
from lorikeet.shard.model.lora.partition import Partition
from lorikeet.shard.model.lora.targets import LoraTarget

Product = Callable[[torch.Tensor], torch.Tensor]
"""`x Wᵀ + b` of rows x: [rows, in]; at least two rows, for equal bits with any number of rows."""


@dataclass(frozen=True)
class SlotHeads:
    """The heads of one adapter."""

    num_heads: int
    hidden_size: int
    blocks: Sequence[Sequence[Product]]
    """Per block one product for each head; the first block may be one product, [H] → [heads * H]."""
    outputs: Sequence[Product] = ()
    """Output heads of version 1: per head [H] → [V]."""
    tensors: Sequence[torch.Tensor] = ()
    """On a device: per block [heads, H, H] and [heads, H], then version 1's [heads, V, H]."""

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, H]. Returns [n, heads, H], the input of the output head."""
        n = rows.shape[0]
        x = rows[:, None].expand(n, self.num_heads, self.hidden_size)
        for products in self.blocks:
            if len(products) == 1:
                y = products[0](rows).view(n, self.num_heads, self.hidden_size)
            else:
                y = torch.stack([product(x[:, j].contiguous()) for j, product in enumerate(products)], dim=1)
            x = x + _silu(y)
        return x


@dataclass(frozen=True)
class _OwnRows:
    """Hidden rows whose logits a version 1 head computes."""

    # [n] rows of the output
    places: torch.Tensor
    # [n, H]
    hidden: torch.Tensor
    product: Product


class HeadKernels(Protocol):
    """Medusa heads on a device other than the CPU. `DeviceHeads` implements it, whose module imports this one."""

    def bind(self, slot: int, heads: SlotHeads) -> None: ...

    def clear(self, slot: int) -> None: ...

    def assumed_outputs(self) -> AbstractContextManager[None]: ...

    def draft(self, rows: torch.Tensor) -> torch.Tensor: ...

    def put_logits(self, x: torch.Tensor, logits: torch.Tensor) -> None: ...


class HeadsPool:
    """The heads of all slots, for the output head of one network."""

    def __init__(self, inputs: StepInputs) -> None:
        self.output: nn.Module | None = None
        """The output head, if the network has one."""
        self.vocab_size = self.hidden_size = 0
        """Vocabulary size and hidden size of the output head."""
        self.partition: Partition | None = None
        """Which rows of it this rank holds; None is all of them."""
        self.is_reached = False
        """Whether the network's logits come from its output head, so that heads can use it."""
        self.kernels: HeadKernels | None = None
        """Replace separate products on a device."""
        self._inputs = inputs
        self._slots: dict[int, SlotHeads] = {}
        self._own: list[_OwnRows] = []

    def attach(self, network: nn.Module, target: LoraTarget) -> None:
        """Add draft rows at the network's output head, which must be in place already. `target`: of that head."""
        output = getattr(network, "get_output_embeddings", lambda: None)()
        if isinstance(output, nn.Module):
            self.vocab_size, self.hidden_size, self.partition = target.num_out, target.num_in, target.partition
            self.output = output
            output.register_forward_pre_hook(self._before)
            output.register_forward_hook(self._after)

    def put(self, slot: int, heads: SlotHeads) -> None:
        """Put heads into `slot`."""
        self._slots[slot] = heads
        if self.kernels is not None:
            self.kernels.bind(slot, heads)

    def clear(self, slot: int) -> None:
        """Empty `slot`, if it has heads."""
        if self._slots.pop(slot, None) is not None and self.kernels is not None:
            self.kernels.clear(slot)

    def prepare(self) -> None:
        """Check a step whose heads a device computes. Raises RuntimeError for heads that are not in their slots."""
        if self.kernels is not None:
            for _, slot, num_drafts in self._inputs.heads:
                self._heads(slot, num_drafts)

    def _before(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Append the draft rows to the output head's input, [1, rows, H]."""
        self.is_reached = True
        self._own.clear()  # rows of a step that failed
        drafting = self._inputs.heads
        if not self._inputs.num_draft_rows:
            return None
        num_rows = self._inputs.logits_rows.shape[0]
        rows = args[0].reshape(-1, args[0].shape[-1])[:num_rows]  # without the second row of a step of one
        if self.kernels is not None:
            return (self.kernels.draft(rows)[None], *args[1:])
        if self._inputs.bounds is not None:
            raise RuntimeError("Medusa heads in a padded step need kernels of a device")
        drafts = self._draft(rows, drafting)
        return (torch.cat([rows, drafts])[None], *args[1:])

    def _draft(self, rows: torch.Tensor, drafting: Sequence[HeadsRow]) -> torch.Tensor:
        """rows: [S, H]. Returns [E, H] in the order of `drafting`."""
        # [E] index of each draft row among the hidden rows of all slots
        sources = [0] * sum(request.num_drafts for request in drafting)
        ends = list(accumulate(request.num_drafts for request in drafting))
        parts: list[torch.Tensor] = []
        first = 0
        by_slot = sorted(range(len(drafting)), key=lambda i: drafting[i].slot)
        for slot, group in groupby(by_slot, lambda i: drafting[i].slot):
            members = list(group)
            heads = self._heads(slot, max(drafting[i].num_drafts for i in members))
            hidden = _of_rows(heads, rows, [drafting[i].row for i in members])
            for index, member in enumerate(members):
                begin, count = ends[member] - drafting[member].num_drafts, drafting[member].num_drafts
                at = first + index * heads.num_heads
                sources[begin : begin + count] = range(at, at + count)
            self._keep_own(heads, hidden, [(ends[i] - drafting[i].num_drafts, drafting[i].num_drafts) for i in members])
            parts.append(hidden.flatten(0, 1))
            first += parts[-1].shape[0]
        drafts = torch.cat(parts) if len(parts) > 1 else parts[0]
        if sources == list(range(first)):
            return drafts
        return drafts.index_select(0, _indices(sources, rows.device))

    def _heads(self, slot: int, num_drafts: int) -> SlotHeads:
        heads = self._slots.get(slot)
        if heads is None or heads.num_heads < num_drafts:
            has = "no" if heads is None else heads.num_heads
            raise RuntimeError(f"slot {slot} has {has} heads, the step needs {num_drafts}")
        return heads

    def _keep_own(self, heads: SlotHeads, hidden: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Record the rows of version 1 heads. hidden: [n, heads, H]; spans: first place and number per row."""
        num_rows = self._inputs.logits_rows.shape[0]
        for head, product in enumerate(heads.outputs):
            members = [index for index, (_, count) in enumerate(spans) if head < count]
            if members:
                places = _indices([num_rows + spans[index][0] + head for index in members], hidden.device)
                rows = hidden[:, head].index_select(0, _indices(members, hidden.device))
                self._own.append(_OwnRows(places, rows, product))

    def _after(self, _: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Write the logits of version 1 heads into their rows, [1, rows, V]."""
        if self.kernels is not None:
            if self._inputs.num_draft_rows:
                self.kernels.put_logits(args[0][0], output.view(-1, output.shape[-1]))
            return
        kept, self._own = self._own, []
        for own in kept:
            output.view(-1, output.shape[-1]).index_copy_(0, own.places, _at_least_two(own.product, own.hidden))


def _of_rows(heads: SlotHeads, rows: torch.Tensor, row_ids: Sequence[int]) -> torch.Tensor:
    """rows: [S, H]. Returns [n, heads, H] of those in `row_ids`."""
    if list(row_ids) != list(range(rows.shape[0])):
        rows = rows.index_select(0, _indices(row_ids, rows.device))
    return _at_least_two(heads.hidden, rows)


def _at_least_two(function: Product, rows: torch.Tensor) -> torch.Tensor:
    """`function` of rows [n, H], a single row computed as two."""
    if rows.shape[0] > 1:
        return function(rows)
    return function(rows.expand(2, -1).contiguous())[:1]


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.long), device)


def _silu(y: torch.Tensor) -> torch.Tensor:
    """y: [n, heads, H] contiguous. On CPU row by row: torch splits larger tensors over vectors and threads, which
    changes the last bit.
    """
    if y.device.type != "cpu":
        return functional.silu(y)
    flat = y.view(y.shape[0], -1)
    if y.dtype == torch.bfloat16 and flat.shape[1] % 16 == 0 and cpu.available():
        return cpu.gate_times(flat, torch.ones_like(flat)).view(y.shape)
    return torch.stack([functional.silu(row) for row in flat]).view(y.shape)
