"""Products of weights in 8 or 4 bits with activations that are rounded to 8 bits: integer.c from Python, and the same
arithmetic in torch, which is the reference and computes where there is no compiler.

Each block of 32 activations of a row is rounded by its own largest value. Sums of products are exact integers; scales
follow in float32 in one order. So both, on any processor and for any number of rows, give equal bits.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from lorikeet.proto.process import FreedMemory
from lorikeet.shard.attention import NativeStep
from lorikeet.shard.model.kernels.cpu import AdapterStep, DecoderLayers, HugePagePool, RmsNorm, addresses_of
from lorikeet.shard.system import gpu
from lorikeet.shard.system.native import CompilerMissing, library

_SOURCE = Path(__file__).with_name("integer.c")
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS: dict[str, tuple[list[Any], Any]] = {
    "outputs_of_a_panel": ([], _SIZE),
    "reads_halves": ([], _SIZE),
    "row_bytes": ([_POINTER], _SIZE),
    "panel_bytes": ([_POINTER], _SIZE),
    "pack": ([_POINTER, *[_SIZE] * 3, *[_POINTER] * 3], None),
    "linear": ([_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _INT], None),
}
_OF_LAYERS: dict[str, tuple[list[Any], Any]] = {
    "gate_times": ([_POINTER, _POINTER, _SIZE, _SIZE, _INT, _POINTER, _INT], None),
    "rms_norm": ([_POINTER, _SIZE, _SIZE, ctypes.POINTER(RmsNorm), _POINTER, _INT], None),
    "norm_heads": ([_POINTER, *[_SIZE] * 4, ctypes.POINTER(RmsNorm), _INT], None),
    "rotate": ([_POINTER, *[_SIZE] * 4, _POINTER, _POINTER, _INT], None),
    "decoder_layers": (
        [_POINTER, _SIZE, *[_POINTER] * 4, ctypes.POINTER(AdapterStep), _POINTER, _SIZE, _SIZE, *[_POINTER] * 3, _INT],
        None,
    ),
}
BLOCK = 32
"""Activations that share a scale; BLOCK of integer.h."""
SMALLEST = 2.0**-100
"""Blocks of smaller values count as zeros; SMALLEST of integer.h."""
_ALIGNMENT = 64
ROWS_OF_A_PART = 64
"""Parts of a weight have a multiple of so many rows: whole panels of any processor."""
PART_ELEMENTS = 1 << 19
"""Most elements of a weight that are converted at once, if its rows are not longer."""
NORM_ELEMENTS = 1 << 17
"""Elements of a weight whose squares are summed at once."""
MOST_AT_ONCE = 4
"""Parts that are packed at once, each by one thread: each takes memory."""
MIDDLE = 8
"""What is subtracted from weights in 4 bits that have no minimum."""

logger = logging.getLogger(__name__)
_pool = HugePagePool()
_freed = FreedMemory()


@dataclass(frozen=True)
class IntegerWeight:
    """A weight as integers: element [n, k] is `scales[n, g] * values[n, k] + minimums[n, g]`, g being the group of k.

    In 4 bits without minimums it is `scales[n, g] * (values[n, k] - MIDDLE)`.
    """

    bits: int
    # [out, in] int8, or uint8 below 16 in 4 bits
    values: torch.Tensor
    # [out, groups] float32
    scales: torch.Tensor
    # [out, groups] float32
    minimums: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_in, num_groups = self.values.shape[1], self.scales.shape[1]
        is_served = num_groups == 1 or self.group == BLOCK // 2 or (self.group > 0 and self.group % BLOCK == 0)
        if not is_served or num_in % num_groups:
            raise ValueError(
                f"its rows of {num_in} weights have {num_groups} groups, which must have {BLOCK // 2} weights or a "
                f"multiple of {BLOCK}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        num_out, num_in = self.values.shape
        return num_out, num_in

    @property
    def group(self) -> int:
        """Weights of a row that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def middle(self) -> int:
        """What is subtracted from each value."""
        return MIDDLE if self.bits == 4 and self.minimums is None else 0

    def read(self, start: int, stop: int) -> "IntegerWeight":
        """The rows from `start` to before `stop`."""
        minimums = None if self.minimums is None else self.minimums[start:stop]
        return IntegerWeight(self.bits, self.values[start:stop], self.scales[start:stop], minimums)

    def parts(self) -> "Iterator[IntegerWeight]":
        """The weight, some rows at a time, in order."""
        return (self.read(start, stop) for start, stop in row_ranges(self.shape))

    def joined(self, others: "Sequence[IntegerWeight]") -> "IntegerWeight":
        """The rows of this weight, then those of others of the same kind."""
        parts = [self, *others]
        minimums = [part.minimums for part in parts if part.minimums is not None]
        return IntegerWeight(
            self.bits,
            torch.cat([part.values for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(minimums) if minimums else None,
        )

    @property
    def kind(self) -> tuple[int, int, int, bool]:
        """What weights must have in common to be joined, or to be multiplied by the same rounded input."""
        return self.values.shape[1], self.bits, self.group, self.minimums is None

    @property
    def nbytes(self) -> int:
        """Bytes of the values and their scales."""
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.minimums) if tensor is not None)

    def squared_norms(self, dtype: torch.dtype) -> torch.Tensor:
        """[out] float32: of the rows in a number format. A few rows at a time: each takes 16 bytes per element."""
        num_rows = max(1, NORM_ELEMENTS // self.shape[1])
        starts = range(0, self.shape[0], num_rows)
        parts = (self.read(start, start + num_rows) for start in starts)
        return torch.cat([part.dense().to(dtype).float().square_().sum(1) for part in parts])

    def dense(self) -> torch.Tensor:
        """[out, in] float32."""
        grouped = self.values.unflatten(1, (-1, self.group)).float() - self.middle
        grouped *= self.scales[:, :, None]
        if self.minimums is not None:
            grouped += self.minimums[:, :, None]
        return grouped.flatten(1)


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a file, read while it is packed."""

    shape: tuple[int, int]
    """[out, in]"""
    kind: tuple[int, int, int, bool]
    """As of an IntegerWeight."""
    read: Callable[[int, int], IntegerWeight]
    """Its rows from the first number to before the second."""
    squared_norms: torch.Tensor | None = None
    """[out] float32 of the rows, NaN until they are read; None where nobody counts them."""

    def parts(self) -> Iterator[IntegerWeight]:
        """The weight, some rows at a time, in order."""
        for start, stop in row_ranges(self.shape):
            yield self.read(start, stop)
            _freed.add((stop - start) * self.shape[1] * torch.float32.itemsize)


@contextmanager
def single_threaded() -> Iterator[int]:
    """Each operator inside uses one thread; yields the number outside. Operators of small tensors take ten times as
    long with several threads where other processes take turns on the cores, because each waits for all.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def _for_each_part(weight: IntegerWeight | StoredWeight, put: Callable[[int, IntegerWeight], None]) -> None:
    """Call `put` with the first row and the rows of every part; with many cores several parts at once."""
    ranges = list(row_ranges(weight.shape))
    with single_threaded() as num_threads, ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        run = threads.map if num_threads >= MOST_AT_ONCE and len(ranges) > 1 else map
        done = run(lambda rows: put(rows[0], weight.read(*rows)), ranges)
        for (start, stop), _ in zip(ranges, done, strict=True):
            if isinstance(weight, StoredWeight):
                _freed.add((stop - start) * weight.shape[1] * torch.float32.itemsize)


def row_ranges(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Starts and ends of the parts of a weight [out, in]."""
    num_out, num_in = shape
    step = max(1, PART_ELEMENTS // (num_in * ROWS_OF_A_PART)) * ROWS_OF_A_PART
    for start in range(0, num_out, step):
        yield start, min(start + step, num_out)


def round_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [rows, in]. Returns values from -127 to 127, [rows, blocks, BLOCK] int32, zeros beyond `in`, and the scale of
    each block, [rows, blocks] float32: NaN for a block that is not finite.
    """
    blocks = functional.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(2)
    is_rounded = largest.isfinite() & (largest >= SMALLEST)
    # no number divided by a tensor: torch would multiply by the reciprocal, which rounds twice
    inverse = torch.where(is_rounded, torch.full_like(largest, 127.0) / largest, 0.0)
    values = torch.where(is_rounded[:, :, None], (blocks * inverse[:, :, None]).round(), 0.0)
    scales = torch.where(is_rounded, gpu.divide(largest, 127.0), torch.where(largest.isfinite(), 0.0, torch.nan))
    return values.int(), scales


def plain_product(x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in torch's operators. x: [rows, in]; bias: [out] float32. Returns [rows, out] in x's dtype."""
    blocks, scales = round_blocks(x)
    # parts have one scale on each side; double precision sums their integers exactly, in any order
    size = min(weight.group, BLOCK)
    # [rows, parts, size] and [out, parts, size]
    values = blocks.double().flatten(1)[:, : x.shape[1]].split(size, 1)
    factors = (weight.values.double() - weight.middle).split(size, 1)
    # [rows, out]
    total = torch.zeros(len(x), len(weight.values))
    for group in range(weight.scales.shape[1]):
        of_group, offset = torch.zeros_like(total), torch.zeros(len(x))
        for part in range(group * weight.group // size, -(-(group + 1) * weight.group // size)):
            scale = scales[:, part * size // BLOCK]
            of_group += (values[part] @ factors[part].T).float() * scale[:, None]
            offset += values[part].sum(1).float() * scale
        total += of_group * weight.scales[:, group]
        if weight.minimums is not None:
            total += offset[:, None] * weight.minimums[:, group]
    return (total if bias is None else total + bias).to(x.dtype)


class _Matrix(ctypes.Structure):
    """`Matrix` of integer.c."""

    _fields_ = [
        *((name, _SIZE) for name in ("num_out", "num_in", "group", "bits", "has_halves", "has_minimums")),
        *((name, _POINTER) for name in ("packed", "least", "depths", "bias")),
    ]


class _NotHalves(Exception):
    """Half precision does not hold the scales of a weight."""


class PackedIntegers:
    """A weight in the layout of integer.c, with its bias."""

    def __init__(self, weight: IntegerWeight | StoredWeight, bias: torch.Tensor | None) -> None:
        """bias: [out] float32. Raises CompilerMissing."""
        self.bias, self.num_out = bias, weight.shape[0]
        # as in most files: a product of few rows is as fast as the memory
        has_halves = bool(_load(torch.float32).reads_halves()) and _holds_halves(weight.read(0, 1))
        try:
            self._pack(weight, has_halves)
        except _NotHalves:
            self._pack(weight, has_halves=False)

    def _pack(self, weight: IntegerWeight | StoredWeight, has_halves: bool) -> None:
        """Raises _NotHalves where a scale is not what `has_halves` says."""
        code = _load(torch.float32)
        num_in, bits, group, has_no_minimums = weight.kind
        least = -MIDDLE if bits == 4 and has_no_minimums else 0
        num_panels = -(-self.num_out // code.outputs_of_a_panel())
        sizes = (self.num_out, num_in, group, bits, has_halves, not has_no_minimums)
        panel_bytes = code.panel_bytes(ctypes.byref(_Matrix(*sizes)))
        # opaque, half as many elements of twice the size
        self.packed = _pool.empty(num_panels * panel_bytes // 2)
        # [2, panels] what is added to stored weights (int8), and how many sums are added in 16 bits
        self.of_panels = torch.empty(2, num_panels, dtype=torch.uint8)
        held = (self.packed.data_ptr(), *(row.data_ptr() for row in self.of_panels))
        self._without_bias = _Matrix(*sizes, *held, None)
        self._matrix = _Matrix(*sizes, *held, None if self.bias is None else self.bias.data_ptr())
        self.row_bytes: int = code.row_bytes(ctypes.byref(self._matrix))

        def put(start: int, part: IntegerWeight) -> None:
            if has_halves and not _holds_halves(part):
                raise _NotHalves
            dtype = torch.float16 if has_halves else torch.float32
            of_groups = (part.scales, part.minimums)
            scales, minimums = (None if each is None else each.to(dtype).contiguous() for each in of_groups)
            tensors = (part.values.contiguous(), scales, minimums)  # held until the call returns
            code.pack(ctypes.byref(self._matrix), start, len(part.values), least, *map(_address, tensors))

        _for_each_part(weight, put)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return self.packed.nbytes

    @property
    def address(self) -> int:
        """Address of the matrix for compiled code, with its bias."""
        return ctypes.addressof(self._matrix)

    def product(self, x: torch.Tensor, with_bias: bool) -> torch.Tensor:
        """x: [rows, in] float32 or bfloat16. Returns [rows, out]."""
        x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty(len(x), self.num_out)
        scratch = torch.empty(len(x) * self.row_bytes, dtype=torch.uint8)
        matrix = ctypes.byref(self._matrix if with_bias else self._without_bias)
        _load(x.dtype).linear(
            matrix, x.data_ptr(), len(x), x.stride(0), scratch.data_ptr(), y.data_ptr(), torch.get_num_threads()
        )
        return y


def _holds_halves(weight: IntegerWeight) -> bool:
    """Whether half precision holds all scales and minimums."""
    of_groups = (values for values in (weight.scales, weight.minimums) if values is not None)
    return all(torch.equal(values.half().float(), values) for values in of_groups)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def gate_times(gate: torch.Tensor, up: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    """As `cpu.gate_times`."""
    h = torch.empty_like(gate)
    pointers = (gate.data_ptr(), up.data_ptr())
    _load(gate.dtype).gate_times(*pointers, *gate.shape, is_tanh, h.data_ptr(), torch.get_num_threads())
    return h


def norm_heads(x: torch.Tensor, first: int, num_heads: int, head_dim: int, norm: RmsNorm) -> None:
    """As `cpu.norm_heads`."""
    place = x.data_ptr() + first * head_dim * x.element_size()
    _load(x.dtype).norm_heads(place, x.shape[0], x.stride(0), num_heads, head_dim, norm, torch.get_num_threads())


def rms_norm(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """As `cpu.rms_norm`."""
    x = x.contiguous()
    width = x.shape[-1]
    y = torch.empty_like(x)
    _load(x.dtype).rms_norm(x.data_ptr(), x.numel() // width, width, norm, y.data_ptr(), torch.get_num_threads())
    return y


def rotate(x: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first `num_heads` heads of each row of x by the row's angles, in place.

    x: [T, columns] contiguous; cos, sin: [T, D] contiguous, both halves of D alike in meaning.
    """
    angles = (cos.data_ptr(), sin.data_ptr())
    _load(x.dtype).rotate(
        x.data_ptr(), x.shape[0], x.stride(0), num_heads, cos.shape[1], *angles, torch.get_num_threads()
    )


def decoder_layers(
    layers: DecoderLayers,
    step: NativeStep,
    adapters: AdapterStep,
    x: torch.Tensor,
    angles: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Compute layers as `cpu.decoder_layers` does, with another library and more scratch memory.

    x: [1, T, H]; angles: of each kind of layers cos, then sin, [T, D]; all contiguous. Returns [1, T, H].
    """
    num_rows = x.shape[1]
    num_attended = min(num_rows, step.num_tokens)
    y = torch.empty_like(x)
    num_spare = -(-(num_rows * layers.row_bytes + _ALIGNMENT) // x.element_size())
    scratch = x.new_empty(num_rows * layers.scratch_width + num_spare)
    _load(x.dtype).decoder_layers(
        layers.addresses, layers.num_layers, step.function, layers.kvs, layers.kinds, step.address, adapters,
        x.data_ptr(), num_rows, num_attended, addresses_of(angles), scratch.data_ptr(), y.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return y


@cache
def available() -> bool:
    """Whether this machine has a compiler or a compiled library; logs once why not."""
    try:
        _load(torch.float32)
        _load(torch.bfloat16)
    except CompilerMissing as reason:
        logger.warning("products of quantised weights run through torch, many times more slowly: %s", reason)
        return False
    return True


@cache
def _load(dtype: torch.dtype, *defines: str) -> ctypes.CDLL:
    loaded = library(_SOURCE, f"BF16={int(dtype == torch.bfloat16)}", *defines)
    of_layers = _OF_LAYERS if dtype == torch.bfloat16 else {}
    for name, (arguments, result) in (_ARGUMENTS | of_layers).items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded
