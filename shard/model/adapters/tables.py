"""Adapters of a model on CUDA: the table of each slot's addresses for each target, and one launch per product.

lora/triton.py has the arithmetic; upload.py copies adapters to the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import structlog
import torch

from lorikeet.shard.batch.row_groups import TASK_ROWS, AdapterRows
from lorikeet.shard.batch.transfer import sendable
from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.kernels.pairs import PairTasks, SortedPairs
from lorikeet.shard.model.kernels.pairs_triton import partition_pairs
from lorikeet.shard.model.kernels.tuning import DEFAULTS, Tuned
from lorikeet.shard.model.lora.targets import ExpertTargets, LoraTarget, Product, SlotImage
from lorikeet.shard.model.lora.triton import ENTRY, PART, add_delta
from lorikeet.shard.system import gpu

log = structlog.get_logger()

_ALIGNED = 16
MATRIX_UNITS = (8, 0)
"""Compute capability from which on Triton multiplies by matrix units, which takes fewer registers."""
PROGRAMS_PER_PROCESSOR = {True: 3, False: 2}
"""Programs that certainly run at once on a multiprocessor, with matrix units and without (docs/cuda-kernels.md)."""
REFUSALS = ("cooperative", "not supported")
"""In the messages of CUDA where it refuses a cooperative launch: too many programs, or a device without support."""
LAUNCH_TIMEOUT_S = 30.0
"""A cooperative launch without rows takes less than 1 ms."""


class DeviceKernels:
    """The targets of one model and their table on the device."""

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        num_slots: int,
        device: torch.device,
        tuned: Tuned = DEFAULTS,
        is_cooperative: bool = True,
    ) -> None:
        """`is_cooperative`: whether a product may be one cooperative launch instead of two launches."""
        self.device = device
        self._is_cooperative = is_cooperative
        self._tuned = tuned
        self._index = {target: index for index, target in enumerate(targets)}
        # [slots, targets, ENTRY] rank and addresses, 0 for none
        self.table = torch.zeros(num_slots, len(targets), ENTRY.value, dtype=torch.int64, device=device)
        # [slots, targets] whether the slot's adapter changes the target
        self._changes = np.zeros(self.table.shape[:2], np.bool_)
        # [2] int32 zeros, for programs that wait for each other
        self._meeting = torch.zeros(2, dtype=torch.int32, device=device)
        self._num_programs = PROGRAMS_PER_PROCESSOR[gpu.capability(device) >= MATRIX_UNITS] * gpu.num_processors(device)
        self._parts: dict[tuple[tuple[LoraTarget, int], ...], torch.Tensor] = {}
        for target in targets:
            target.kernels = self

    def try_cooperative_launch(self, dtype: torch.dtype) -> None:
        """Try the largest cooperative launch, for a step of this dtype without rows. Where CUDA refuses it, products
        take two launches. Raises ValueError if it does not finish.
        """
        target = next((target for target in self._index if not target.is_embedding), None)
        if target is None or not self._is_cooperative:
            return
        x, y = (torch.zeros(1, size, dtype=dtype, device=self.device) for size in (target.num_in, target.num_out))
        tasks = torch.zeros(self._num_programs, 3, dtype=torch.int32, device=self.device)
        parts = self._describe([(target, 0)])
        try:
            self._add(x, y, tasks, tasks[0, :1], parts, self.table, target.num_in, target.num_out)
        except RuntimeError as reason:
            if not any(words in str(reason).lower() for words in REFUSALS):
                raise
            self._is_cooperative = False
            log.warning(
                "cooperative_launch_refused", reason=str(reason), effect="adapters take two launches per product"
            )
            return
        if not gpu.finishes(self.device, LAUNCH_TIMEOUT_S):
            raise ValueError(
                f"the cooperative launch of the adapter kernel did not finish within {LAUNCH_TIMEOUT_S:g} s on "
                f"{self.device}: start with --disable-custom-kernels"
            )

    def image(self, targets: Sequence[LoraTarget], entries: npt.NDArray[np.int64]) -> SlotImage:
        """The table rows of an adapter. entries: [targets, 5] rank, and offsets in the adapter's memory of a, b, scale
        and bias, -1 for none.
        """
        found = np.full((len(self._index), ENTRY.value), -1, np.int64)
        found[:, 0] = 0
        found[[self._index[target] for target in targets]] = entries
        return SlotImage(found)

    def bind(self, slot: int, image: SlotImage, memory: torch.Tensor) -> None:
        """Put the adapter in `memory`, [bytes] on the device, into `slot`, for steps launched from now on."""
        offsets = image.entries[:, 1:]
        self._changes[slot] = (offsets >= 0).any(axis=1)
        entries = image.entries.copy()
        entries[:, 1:] = np.where(offsets >= 0, offsets + memory.data_ptr(), 0)
        self.table[slot].copy_(sendable(torch.from_numpy(entries), self.device), non_blocking=True)

    def clear(self, slot: int) -> None:
        """Empty `slot`, for steps launched from now on."""
        self.table[slot].zero_()
        self._changes[slot] = False

    def adapt(self, rows: AdapterRows, products: Sequence[Product]) -> None:
        """Add the rows' adapters to every product: one launch for columns of one output, else one for each."""
        first = products[0]
        if len(products) > 1 and all(_is_next_to(first, other) for other in products[1:]):
            self._launch(rows, products)
            return
        for product in products:
            self._launch(rows, [product])

    def adapt_embedding(self, rows: AdapterRows, target: LoraTarget, ids: torch.Tensor, y: torch.Tensor) -> None:
        """ids: [rows] token ids; y: [rows, H], in place."""
        self._call(rows, ids, y, [(target, 0)])

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

    def pair_slots(self, rows: AdapterRows, num_rows: int) -> tuple[torch.Tensor, int]:
        """[num_rows] int32 the slot of each row of the step, -1 for none; and the number of slots."""
        if rows.groups is None:
            raise RuntimeError("the rows of adapters were not copied to the device")
        return rows.groups.row_slots[:num_rows], self.table.shape[0]

    def pair_tasks(self, pairs: SortedPairs) -> PairTasks:
        """For `adapt_pairs`; values are indices of entries, from that of slot 0 and expert 0 on."""
        return partition_pairs(pairs, TASK_ROWS, self.table.shape[1])

    def adapt_pairs(self, tasks: PairTasks, targets: ExpertTargets, x: torch.Tensor, y: torch.Tensor) -> None:
        """x: [P, in], y: [P, out] of pairs, contiguous, y changed in place; tasks: by `pair_tasks` of these pairs."""
        parts = self._describe([(targets.experts[0], 0)])
        # targets of experts are neighbours in the table: an index from the first one's entry
        table = self.table.view(-1, 1, ENTRY.value)
        self._add(x, y, tasks.tasks, tasks.pair_ids, parts, table, targets.num_in, targets.num_out)

    def _launch(self, rows: AdapterRows, products: Sequence[Product]) -> None:
        first = products[0]
        columns = [(product.target, _distance(first.y, product.y)) for product in products]
        num_columns = max(column + target.num_out for target, column in columns)
        # [rows, columns of all parts]
        y = first.y if len(products) == 1 else first.y.as_strided((first.y.shape[0], num_columns), first.y.stride())
        x = first.x if first.x.stride(1) == 1 else first.x.contiguous()
        self._call(rows, x, y, columns)

    def _call(
        self, rows: AdapterRows, x: torch.Tensor, y: torch.Tensor, columns: Sequence[tuple[LoraTarget, int]]
    ) -> None:
        groups = rows.groups
        if groups is None:
            raise RuntimeError("the rows of adapters were not copied to the device")
        is_aligned = all(target.num_out % _ALIGNED == 0 and column % _ALIGNED == 0 for target, column in columns)
        num_out = max(target.num_out for target, _ in columns)
        parts = self._describe(columns)
        self._add(x, y, groups.tasks, groups.row_ids, parts, self.table, columns[0][0].num_in, num_out, is_aligned)

    def _add(
        self, x: torch.Tensor, y: torch.Tensor, tasks: torch.Tensor, row_ids: torch.Tensor, parts: torch.Tensor,
        table: torch.Tensor, num_in: int, num_out: int, is_aligned: bool | None = None,
    ) -> None:  # fmt: skip
        """As add_delta. num_out: most of a part. Tiles depend on the modules alone, so that a row's bits do not depend
        on the step.
        """
        tiles = self._tuned.tiles("shrink", num_in, y.dtype) + self._tuned.tiles("expand", num_out, y.dtype)
        is_aligned = num_out % _ALIGNED == 0 if is_aligned is None else is_aligned
        # what kernels take is known of built-in tiles in 16 bits alone
        may_meet = self._is_cooperative and not self._tuned.entries and y.dtype != torch.float32
        shape = [tasks.shape[0], num_out, self._num_programs, int(may_meet)]
        add_delta(x, y, tasks, row_ids, parts, table, self._meeting, shape, is_aligned, tiles)

    def _describe(self, columns: Sequence[tuple[LoraTarget, int]]) -> torch.Tensor:
        """[parts, PART] on the device; made once for each combination of modules."""
        key = tuple(columns)
        if key not in self._parts:
            biases = (0 if target.base_bias is None else target.base_bias.data_ptr() for target, _ in columns)
            parts = [(self._index[of], of.num_out, at, bias) for (of, at), bias in zip(columns, biases, strict=True)]
            self._parts[key] = torch.tensor(parts, dtype=torch.int64, device=self.device).view(-1, PART.value)
        return self._parts[key]


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
