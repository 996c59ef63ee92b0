"""Adapters of a model on CUDA: the table of each slot's addresses for each target, and two launches per product.

lora/triton.py has the arithmetic; upload.py copies adapters to the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.proto.params import Composition
from lorikeet.shard.batch.row_groups import TASK_ROWS, AdapterRows, RowGroups
from lorikeet.shard.batch.transfer import sendable
from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.kernels.pairs import PairTasks, SortedPairs
from lorikeet.shard.model.kernels.pairs_triton import partition_pairs
from lorikeet.shard.model.kernels.tuning import DEFAULTS, Tuned
from lorikeet.shard.model.lora.targets import ExpertTargets, LoraTarget, Product, Shrunk, SlotImage
from lorikeet.shard.model.lora.triton import (
    ENTRY,
    PART,
    SUM,
    expand_rows,
    expand_sums_rows,
    shrink_rows,
    shrink_sums_rows,
)
from lorikeet.shard.system import gpu

_ALIGNED = 16
MATRIX_UNITS = (8, 0)
"""Compute capability from which on Triton multiplies by matrix units, which takes fewer registers."""
PROGRAMS_PER_PROCESSOR = {True: 6, False: 2}
"""Programs of a launch for each multiprocessor, with matrix units and without: as many as run at once
(docs/cuda-kernels.md).
"""


class DeviceKernels:
    """The targets of one model and their table on the device."""

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        num_slots: int,
        device: torch.device,
        tuned: Tuned = DEFAULTS,
        num_sums: int = 0,
    ) -> None:
        """`num_sums`: slots behind those of adapters for sums of adapters."""
        self.device = device
        self._tuned = tuned
        self._index = {target: index for index, target in enumerate(targets)}
        self._norms = [target for target in targets if target.is_norm and not target.is_adapted_inside]
        # [slots, targets, ENTRY] rank and addresses, 0 for none
        self.table = torch.zeros(num_slots + num_sums, len(targets), ENTRY.value, dtype=torch.int64, device=device)
        self._num_slots = num_slots
        # [sums, SUM] the adapters of each sum
        self.sums = torch.zeros(num_sums, SUM.value, dtype=torch.int32, device=device)
        # [slots, targets] whether the slot's adapter changes the target
        self._changes = np.zeros(self.table.shape[:2], np.bool_)
        self._num_programs = PROGRAMS_PER_PROCESSOR[gpu.capability(device) >= MATRIX_UNITS] * gpu.num_processors(device)
        self._parts: dict[tuple[tuple[LoraTarget, int], ...], torch.Tensor] = {}
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memories: dict[int, torch.Tensor] = {}  # the table has their addresses alone
        for target in targets:
            target.kernels = self

    def image(self, targets: Sequence[LoraTarget], entries: npt.NDArray[np.int64]) -> SlotImage:
        """The table rows of an adapter. entries: [targets, 5] rank, and offsets in the adapter's memory of a, b, scale
        and bias, -1 for none.
        """
        found = np.full((len(self._index), ENTRY.value), -1, np.int64)
        found[:, 0] = 0
        found[[self._index[target] for target in targets]] = entries
        return SlotImage(found)

    def bind(self, slot: int, image: SlotImage, memory: torch.Tensor) -> None:
        """Put the adapter in `memory`, [bytes] on the device, into `slot`, for steps launched from now on. It is held
        until the slot is cleared or bound again.
        """
        offsets = image.entries[:, 1:]
        self._changes[slot] = (offsets >= 0).any(axis=1)
        self._note_norms(slot)
        entries = image.entries.copy()
        entries[:, 1:] = np.where(offsets >= 0, offsets + memory.data_ptr(), 0)
        self.table[slot].copy_(sendable(torch.from_numpy(entries), self.device), non_blocking=True)
        self._memories[slot] = memory

    def clear(self, slot: int) -> None:
        """Empty `slot`, for steps launched from now on."""
        self.table[slot].zero_()
        self._changes[slot] = False
        self._note_norms(slot)
        self._memories.pop(slot, None)

    def compose(self, slot: int, composition: Composition, slots: Sequence[int]) -> None:
        """Make `slot` the sum of the adapters in `slots`, for steps launched from now on."""
        entry = np.zeros(SUM.value, np.int32)
        entry[:2] = len(slots), composition.shares_factors
        members = entry[2:].reshape(3, -1)
        members[0, : len(slots)] = slots
        weights = members[1:].view(np.float32)
        weights[:, : len(slots)] = composition.shrink_weights, composition.expand_weights
        self.sums[slot - self._num_slots].copy_(sendable(torch.from_numpy(entry), self.device), non_blocking=True)

    def begin(self, rows: AdapterRows, targets: Sequence[LoraTarget], x: torch.Tensor) -> Shrunk | None:
        """Launch `A x` of targets whose outputs are neighbouring columns, next to the base's product. x: [rows, in].

        None where it would not pay: outside of a graph the host's part of another stream costs more than it saves.
        """
        if self._side_stream is None or not torch.cuda.is_current_stream_capturing():
            return None
        # h returns to this stream's memory, and is used again only after the next `wait_stream`
        self._side_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side_stream):
            return self._shrink(rows, x, self._describe(_columns(targets)), self._side_stream)

    def adapt(self, rows: AdapterRows, products: Sequence[Product], shrunk: Shrunk | None = None) -> None:
        """Add the rows' adapters to every product: two launches for columns of one output, else two for each.
        shrunk: what `begin` returned for the products' targets.
        """
        first = products[0]
        if len(products) > 1 and not all(_is_next_to(first, other) for other in products[1:]):
            for product in products:
                self.adapt(rows, [product])
            return
        columns = [(product.target, _distance(first.y, product.y)) for product in products]
        num_columns = max(column + target.num_out for target, column in columns)
        # [rows, columns of all parts]
        y = first.y if len(products) == 1 else first.y.as_strided((first.y.shape[0], num_columns), first.y.stride())
        if shrunk is None:
            shrunk = self._shrink(rows, first.x, self._describe(columns))
        self._expand(rows, shrunk, y, columns)
        if _groups_of(rows).has_sums:
            self._add_sums(rows, first.x, y, columns)

    def adapt_embedding(self, rows: AdapterRows, target: LoraTarget, ids: torch.Tensor, y: torch.Tensor) -> None:
        """ids: [rows] token ids; y: [rows, H], in place."""
        columns = [(target, 0)]
        self._expand(rows, Shrunk(ids, self._describe(columns), 1, None), y, columns)
        if _groups_of(rows).has_sums:
            self._add_sums(rows, ids, y, columns)

    @contextmanager
    def assumed_changed(self, slot: int) -> Iterator[None]:
        """Inside, steps launch the kernels of every target for an empty slot, which change nothing."""
        before = self._changes[slot].copy()
        self._changes[slot] = True
        try:
            yield
        finally:
            self._changes[slot] = before

    def change(self, rows: AdapterRows, target: LoraTarget) -> bool:
        """Whether the adapter of one of the rows changes the target."""
        return bool(self._changes[rows.tasks[:, 0], self._index[target]].any())

    def norm_changes(
        self, rows: AdapterRows, target: LoraTarget, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """What the kernel of a norm of `num_rows` rows reads: [rows or more] int32 the slot of each, -1 for none; the
        table; and the place of the norm in it. Raises RuntimeError for other rows than those of all tokens.
        """
        slots = _groups_of(rows).row_slots
        if num_rows != len(slots) - 1:
            raise RuntimeError(f"{target.name}: adapters need the rows of all tokens")
        return slots, self.table, self._index[target]

    def _note_norms(self, slot: int) -> None:
        """Steps whose adapters change norms after their kernels cannot be replayed."""
        if self._norms:
            changes = self._changes[slot, [self._index[norm] for norm in self._norms]]
            self._norms[0].note_norm(slot, bool(changes.any()))

    def pair_slots(self, rows: AdapterRows, num_rows: int) -> tuple[torch.Tensor, int]:
        """[num_rows] int32 the slot of each row of the step, -1 for none; and the number of slots."""
        return _groups_of(rows).row_slots[:num_rows], self.table.shape[0]

    def pair_tasks(self, pairs: SortedPairs) -> PairTasks:
        """For `adapt_pairs`; values are indices of entries, from that of slot 0 and expert 0 on."""
        return partition_pairs(pairs, TASK_ROWS, self.table.shape[1])

    def adapt_pairs(self, tasks: PairTasks, targets: ExpertTargets, x: torch.Tensor, y: torch.Tensor) -> None:
        """x: [P, in], y: [P, out] of pairs, contiguous, y changed in place; tasks: by `pair_tasks` of these pairs."""
        parts = self._describe([(targets.experts[0], 0)])
        # targets of experts are neighbours in the table: an index from the first one's entry
        table = self.table.view(-1, 1, ENTRY.value)
        shrinking = self._tuned.tiles("shrink", targets.num_in, y.dtype)
        expanding = self._tuned.tiles("expand", targets.num_out, y.dtype)
        h = shrink_rows(x, tasks.tasks, tasks.pair_ids, parts, table, self._num_programs, shrinking)
        expand_rows(
            h, y, tasks.tasks, tasks.pair_ids, parts, table, [targets.num_out], self._num_programs,
            targets.num_out % _ALIGNED == 0, shrinking[1], expanding,
        )  # fmt: skip

    def _shrink(
        self, rows: AdapterRows, x: torch.Tensor, parts: torch.Tensor, stream: torch.cuda.Stream | None = None
    ) -> Shrunk:
        """x: [rows, in]; stream: the current one if it is not that of what comes before and after."""
        groups = _groups_of(rows)
        x = x if x.stride(1) == 1 else x.contiguous()
        tiles = self._tuned.tiles("shrink", x.shape[1], x.dtype)
        h = shrink_rows(x, groups.tasks, groups.row_ids, parts, self.table, self._num_programs, tiles)
        return Shrunk(h, parts, tiles[1], stream)

    def _expand(
        self, rows: AdapterRows, shrunk: Shrunk, y: torch.Tensor, columns: Sequence[tuple[LoraTarget, int]]
    ) -> None:
        """y: [rows, columns of all parts], in place."""
        groups = _groups_of(rows)
        if shrunk.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(shrunk.stream)
        num_outs = [target.num_out for target, _ in columns]
        is_aligned = all(target.num_out % _ALIGNED == 0 and column % _ALIGNED == 0 for target, column in columns)
        expand_rows(
            shrunk.h, y, groups.tasks, groups.row_ids, shrunk.parts, self.table, num_outs, self._num_programs,
            is_aligned, shrunk.splits, self._tuned.tiles("expand", max(num_outs), y.dtype),
        )  # fmt: skip

    def _add_sums(
        self, rows: AdapterRows, x: torch.Tensor, y: torch.Tensor, columns: Sequence[tuple[LoraTarget, int]]
    ) -> None:
        """Add the rows' sums of adapters. x: [rows, in], or [rows] token ids; y: [rows, columns of all parts], in
        place.
        """
        groups, parts, num_outs = _groups_of(rows), self._describe(columns), [target.num_out for target, _ in columns]
        h, splits = x, 1
        if x.dim() == 2:
            x = x if x.stride(1) == 1 else x.contiguous()
            tiles = self._tuned.tiles("shrink", x.shape[1], x.dtype)
            splits = tiles[1]
            h = shrink_sums_rows(
                x, groups.tasks, groups.row_ids, parts, self.table, self.sums, self._num_programs, tiles
            )  # fmt: skip
        expand_sums_rows(
            h, y, groups.tasks, groups.row_ids, parts, self.table, self.sums, num_outs, self._num_programs, splits,
            self._tuned.tiles("expand", max(num_outs), y.dtype),
        )  # fmt: skip

    def _describe(self, columns: Sequence[tuple[LoraTarget, int]]) -> torch.Tensor:
        """[parts, PART] on the device; made once for each combination of modules."""
        key = tuple(columns)
        if key not in self._parts:
            biases = (0 if target.base_bias is None else target.base_bias.data_ptr() for target, _ in columns)
            parts = [(self._index[of], of.num_out, at, bias) for (of, at), bias in zip(columns, biases, strict=True)]
            self._parts[key] = torch.tensor(parts, dtype=torch.int64, device=self.device).view(-1, PART.value)
        return self._parts[key]


def _groups_of(rows: AdapterRows) -> RowGroups:
    if rows.groups is None:
        raise RuntimeError("the rows of adapters were not copied to the device")
    return rows.groups


def _columns(targets: Sequence[LoraTarget]) -> list[tuple[LoraTarget, int]]:
    """Targets whose outputs are neighbouring columns, and the first column of each."""
    ends = list(accumulate((target.num_out for target in targets), initial=0))
    return list(zip(targets, ends, strict=False))


def _distance(first: torch.Tensor, other: torch.Tensor) -> int:
    """Elements between the starts of both."""
    return (other.data_ptr() - first.data_ptr()) // first.element_size()


def _is_next_to(first: Product, other: Product) -> bool:
    """Whether both have the same input, and outputs that are columns of one matrix, the first's before the other's."""
    same_input = first.x.data_ptr() == other.x.data_ptr() and first.x.stride() == other.x.stride()
    same_matrix = first.y.untyped_storage().data_ptr() == other.y.untyped_storage().data_ptr()
    same_rows = first.y.stride() == other.y.stride() and first.y.shape[0] == other.y.shape[0]
    fits = 0 < _distance(first.y, other.y) <= first.y.stride(0) - other.target.num_out
    return same_input and same_matrix and same_rows and first.target.num_in == other.target.num_in and fits


def targets_of(targets: Mapping[str, Target]) -> list[LoraTarget]:
    """All of a model's, those of one parameter's experts next to each other."""
    return [
        one
        for target in targets.values()
        for one in (target.experts if isinstance(target, ExpertTargets) else [target])
    ]
