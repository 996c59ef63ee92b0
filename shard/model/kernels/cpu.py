"""cpu.c from Python: products, gated MLP, norm, rotary and decoder layers in bfloat16, where it can be built.

Semantics are those of the plain modules: sums in float32, each result rounded once to bfloat16. Packed weights lie in
huge pages where the system provides them: they are then read about a tenth faster.
"""

import ctypes
import logging
import mmap
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch.nn import functional

from lorikeet.shard.attention import NativeStep
from lorikeet.shard.system.native import CompilerMissing, library

BLOCK = 64
"""Outputs per block of a packed matrix; BLOCK of cpu.c."""
REGION_BYTES = 64 * 2**20
"""Bytes of memory that matrices share: one matrix alone would leave most of its last page unused."""

_SOURCE = Path(__file__).with_name("cpu.c")
_ALIGNMENT = 64
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python's mmap does not name: reserved address space does not count as allocated."""
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

NUM_MODULES = 7
"""Modules of a decoder layer: q, k, v, out, gate, up, down."""

logger = logging.getLogger(__name__)


class AdapterStep(ctypes.Structure):
    """`AdapterStep` of cpu.c."""

    _fields_ = [("adapt", _POINTER), ("tasks", _POINTER), ("num_tasks", _SIZE)]


class RmsNorm(ctypes.Structure):
    """`Norm` of decoder_layer.h."""

    _fields_ = [("weight", _POINTER), ("epsilon", _FLOAT), ("offset", _FLOAT), ("rounds", _SIZE)]

    @classmethod
    def of(cls, weight: torch.Tensor, epsilon: float, offset: float, rounds: bool) -> "RmsNorm":
        """weight: [H] bfloat16, which is referenced by address."""
        return cls(weight.data_ptr(), epsilon, offset, rounds)


class DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of cpu.c."""

    _fields_ = [
        *((name, _SIZE) for name in ("width", "num_heads", "num_kv_heads", "head_dim", "num_hidden", "is_tanh")),
        *((name, RmsNorm) for name in ("input_norm", "attended_norm", "mlp_norm", "output_norm")),
        *((name, RmsNorm) for name in ("query_norm", "key_norm")),
        *((name, _POINTER) for name in ("qkv", "out", "gate", "up", "down")),
        *((name, _POINTER) for name in ("qkv_bias", "out_bias")),
        ("adapters", _POINTER * NUM_MODULES),
        ("base_bias", _POINTER * NUM_MODULES),
    ]
    row_bytes = 0
    """Bytes per row of the most scratch that a product of integers needs."""

    @property
    def scratch_width(self) -> int:
        """Elements of scratch per row."""
        heads: int = 2 * (self.num_heads + self.num_kv_heads)
        return int(self.width + heads * self.head_dim + 2 * self.num_hidden)


class DecoderLayers:
    """Decoder layers and their KV for compiled code."""

    def __init__(self, layers: Sequence[DecoderLayer], kinds: Sequence[int]) -> None:
        """kinds: of each layer the place of its angles among those of a step."""
        self._layers = layers  # referenced by address
        self.num_layers = len(layers)
        self.kinds = (_SIZE * self.num_layers)(*kinds)
        self.addresses = (_POINTER * self.num_layers)(*map(ctypes.addressof, layers))
        self.kvs = (_POINTER * self.num_layers)()
        """Address of each layer's KV."""
        self.scratch_width = max(layer.scratch_width for layer in layers)
        self.row_bytes = max(layer.row_bytes for layer in layers)


class _Tensor:
    """The type of an argument that is a tensor, or None."""

    @staticmethod
    def from_param(tensor: torch.Tensor | None) -> ctypes.c_void_p:
        return _POINTER(None if tensor is None else tensor.data_ptr())


_ARGUMENTS = {
    "pack": [_Tensor, _SIZE, _SIZE, _Tensor],
    "take_rows": [_Tensor, _SIZE, _SIZE, _Tensor, _SIZE, _Tensor, _INT],
    "linear": [_Tensor, _SIZE, _SIZE, _Tensor, _SIZE, _SIZE, _Tensor, _Tensor, _INT],
    "plain_linear": [_Tensor, _SIZE, _SIZE, _Tensor, _SIZE, _SIZE, _Tensor, _Tensor, _INT],
    "gated_mlp": [_Tensor, _SIZE, _SIZE, _Tensor, _Tensor, _SIZE, _Tensor, _SIZE, _INT, _Tensor, _Tensor, _INT],
    "gate_times": [_Tensor, _Tensor, _SIZE, _SIZE, _INT, _Tensor, _INT],
    "rms_norm": [_Tensor, _SIZE, _SIZE, ctypes.POINTER(RmsNorm), _Tensor, _INT],
    "norm_heads": [_POINTER, *[_SIZE] * 4, ctypes.POINTER(RmsNorm), _INT],
    "rotate": [_Tensor, _SIZE, _SIZE, _SIZE, _SIZE, _Tensor, _Tensor, _INT],
    "decoder_layers": [
        _POINTER, _SIZE, *[_POINTER] * 4, ctypes.POINTER(AdapterStep), _Tensor, _SIZE, _SIZE, _POINTER,
        *[_Tensor] * 2, _INT,
    ],
}  # fmt: skip


@cache
def _load(*defines: str) -> ctypes.CDLL:
    loaded = library(_SOURCE, *defines)
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.prepare.restype = loaded.take_rows.restype = _INT
    loaded.prepare()
    return loaded


@cache
def available() -> bool:
    """Whether this machine has a compiler, or kernels compiled for it in advance; logs once why not."""
    try:
        _load()
    except CompilerMissing as reason:
        logger.warning("bfloat16 products run through torch, more slowly: %s", reason)
        return False
    return True


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Fresh memory, in huge pages where the system provides them. Pages are allocated when they are first written."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class HugePagePool:
    """Allocates from one region after another; a region is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._region = huge_pages(mmap.PAGESIZE)
        self._used = self._left = 0

    def empty(self, num_elements: int) -> torch.Tensor:
        """[num_elements] bfloat16, at a multiple of 64 bytes."""
        num_bytes = -(-num_elements * 2 // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > self._left:
            self._used, self._left = 0, max(REGION_BYTES, num_bytes)
            self._region = huge_pages(self._left)
        tensor = torch.frombuffer(self._region, dtype=torch.bfloat16, count=num_elements, offset=self._used)
        self._used, self._left = self._used + num_bytes, self._left - num_bytes
        return tensor


_pool = HugePagePool()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out, in] contiguous bfloat16, in even. Returns [blocks * BLOCK * in], opaque."""
    num_out, num_in = weight.shape
    packed = _pool.empty(-(-num_out // BLOCK) * BLOCK * num_in)
    _load().pack(weight, num_out, num_in, packed)
    return packed


def take_rows(packed: torch.Tensor, num_out: int, num_in: int, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the weight that `pack` was given. packed: of [num_out, num_in]; ids: integers, [...].

    Returns [..., num_in]. Raises IndexError for an id that no row has.
    """
    ids = ids.long().contiguous()
    y = packed.new_empty(*ids.shape, num_in)
    if not _load().take_rows(packed, num_out, num_in, ids, ids.numel(), y, torch.get_num_threads()):
        raise IndexError(f"token ids must be below {num_out}")
    return y


def linear(x: torch.Tensor, packed: torch.Tensor, num_out: int, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [..., in] bfloat16; packed: by `pack`; bias: [out] float32. Returns [..., out]."""
    rows = _rows(x)
    (num_rows, num_in), stride = rows.shape, rows.stride(0)
    y = x.new_empty(*x.shape[:-1], num_out)
    _load().linear(rows, num_rows, stride, packed, num_out, num_in, bias, y, torch.get_num_threads())
    return y


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply as `linear` does, with a weight that is packed anew. x: [..., in] bfloat16; weight: [out, in] bfloat16;
    bias: [out] bfloat16. Returns [..., out].
    """
    if weight.shape[1] % 2:  # pairs are packed
        x, weight = (functional.pad(matrix, (0, 1)) for matrix in (x, weight))
    rows, weight = _rows(x), weight.contiguous()
    (num_rows, num_in), stride = rows.shape, rows.stride(0)
    num_out = weight.shape[0]
    y = x.new_empty(*x.shape[:-1], num_out)
    wide = None if bias is None else bias.float()
    _load().plain_linear(rows, num_rows, stride, weight, num_out, num_in, wide, y, torch.get_num_threads())
    return y


def gated_mlp(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    num_hidden: int,
    down: torch.Tensor,
    num_out: int,
    is_tanh: bool = False,
) -> torch.Tensor:
    """`down(act(gate x) * up x)`, `act` as in `gate_times`. x: [..., in]; gate, up: packed [hidden, in]; down: packed
    [out, hidden].
    """
    rows = _rows(x).contiguous()
    hidden = x.new_empty(rows.shape[0], num_hidden)
    y = x.new_empty(*x.shape[:-1], num_out)
    activated = (num_out, is_tanh, hidden, y)
    _load().gated_mlp(rows, *rows.shape, gate, up, num_hidden, down, *activated, torch.get_num_threads())
    return y


def gate_times(gate: torch.Tensor, up: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    """`silu(gate) * up`, or with GELU's tanh formula, rounded as the plain modules round. gate, up: [rows, n]
    contiguous. Returns [rows, n].
    """
    h = torch.empty_like(gate)
    _load().gate_times(gate, up, *gate.shape, is_tanh, h, torch.get_num_threads())
    return h


def rms_norm(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """`(weight + offset) * x / sqrt(mean(x²) + epsilon)` over the last axis, which 16 divides."""
    x = x.contiguous()
    width = x.shape[-1]
    y = torch.empty_like(x)
    _load().rms_norm(x, x.numel() // width, width, norm, y, torch.get_num_threads())
    return y


def norm_heads(x: torch.Tensor, first: int, num_heads: int, head_dim: int, norm: RmsNorm) -> None:
    """The norm of `num_heads` heads of each row of x from head `first` on, in place. x: [T, columns] contiguous."""
    place = x.data_ptr() + first * head_dim * x.element_size()
    _load().norm_heads(place, x.shape[0], x.stride(0), num_heads, head_dim, norm, torch.get_num_threads())


def rotate(x: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first `num_heads` heads of each row of x by the row's angles, in place.

    x: [T, columns] contiguous; cos, sin: [T, D] contiguous, both halves of D alike in meaning; 32 divides D.
    """
    _load().rotate(x, x.shape[0], x.stride(0), num_heads, cos.shape[1], cos, sin, torch.get_num_threads())


def decoder_layers(
    layers: DecoderLayers,
    step: NativeStep,
    adapters: AdapterStep,
    x: torch.Tensor,
    angles: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Compute norm, attention, residual, norm, gated MLP and residual of each layer, all layers in one call.

    x: [1, T, H]; angles: of each kind of layers cos, then sin, [T, D]; all contiguous. Returns [1, T, H].
    """
    num_rows = x.shape[1]
    num_attended = min(num_rows, step.num_tokens)
    y = torch.empty_like(x)
    scratch = x.new_empty(num_rows * layers.scratch_width)
    _load().decoder_layers(
        layers.addresses, layers.num_layers, step.function, layers.kvs, layers.kinds, step.address, adapters, x,
        num_rows, num_attended, addresses_of(angles), scratch, y, torch.get_num_threads(),
    )  # fmt: skip
    return y


def addresses_of(tensors: Sequence[torch.Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    """Their addresses, for compiled code."""
    return (_POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, in], contiguous along the last axis."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
