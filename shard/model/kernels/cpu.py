"""cpu.c from Python: products, gated MLP, norm, rotary and decoder layers in bfloat16, where it can be built.

Semantics are those of the plain modules: sums in float32, each result rounded once to bfloat16.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

from lorikeet.shard.attention import NativeAttention
from lorikeet.shard.model.kernels import large_pages
from lorikeet.shard.system.native import CompilerMissing, library

BLOCK = 64
"""Outputs per block of a packed matrix; BLOCK of cpu.c."""

_SOURCE = Path(__file__).with_name("cpu.c")
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

NUM_MODULES = 7
"""Of a decoder layer: q, k, v, out, gate, up, down."""

logger = logging.getLogger(__name__)


class AdapterStep(ctypes.Structure):
    """`AdapterStep` of cpu.c."""

    _fields_ = [("adapt", _POINTER), ("tasks", _POINTER), ("num_tasks", _SIZE)]


class DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of cpu.c."""

    _fields_ = [
        *((name, _SIZE) for name in ("width", "num_heads", "num_kv_heads", "head_dim", "num_hidden")),
        *((name, _POINTER) for name in ("input_norm", "post_norm", "qkv", "out", "gate", "up", "down")),
        *((name, _POINTER) for name in ("qkv_bias", "out_bias")),
        *((name, ctypes.c_float) for name in ("input_epsilon", "post_epsilon")),
        ("adapters", _POINTER * NUM_MODULES),
        ("base_bias", _POINTER * NUM_MODULES),
    ]

    @property
    def scratch_width(self) -> int:
        """Elements of scratch per row."""
        heads: int = 2 * (self.num_heads + self.num_kv_heads)
        return int(self.width + heads * self.head_dim + 2 * self.num_hidden)


@cache
def _load(*defines: str) -> ctypes.CDLL:
    loaded = library(_SOURCE, *defines)
    loaded.pack.argtypes = [_POINTER, _SIZE, _SIZE, _POINTER]
    loaded.linear.argtypes = [_POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _INT]
    loaded.gated_mlp.argtypes = [
        _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER, _INT,
    ]  # fmt: skip
    loaded.rms_norm.argtypes = [_POINTER, _SIZE, _SIZE, _POINTER, ctypes.c_float, _POINTER, _INT]
    loaded.rotate.argtypes = [_POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _INT]
    loaded.decoder_layer.argtypes = [
        ctypes.POINTER(DecoderLayer), _POINTER, _POINTER, _POINTER, ctypes.POINTER(AdapterStep), _POINTER, _SIZE, _SIZE,
        _POINTER, _POINTER, _POINTER, _POINTER, _INT,
    ]  # fmt: skip
    loaded.silu_times.argtypes = [_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _INT]
    for name in ("pack", "linear", "gated_mlp", "silu_times", "rms_norm", "rotate", "decoder_layer"):
        getattr(loaded, name).restype = None
    loaded.prepare.restype = _INT
    loaded.prepare()
    return loaded


@cache
def available() -> bool:
    """Whether this machine has the instructions (AVX512-BF16) and a compiler; says once why not."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported() or not _has_instructions():
        return False
    try:
        _load()
    except CompilerMissing as reason:
        logger.warning("bfloat16 products run through oneDNN, more slowly: %s", reason)
        return False
    return True


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out, in] contiguous bfloat16, in even. Returns [blocks * BLOCK * in], opaque."""
    num_out, num_in = weight.shape
    packed = large_pages.empty(-(-num_out // BLOCK) * BLOCK * num_in)
    _load().pack(weight.data_ptr(), num_out, num_in, packed.data_ptr())
    return packed


def linear(x: torch.Tensor, packed: torch.Tensor, num_out: int, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [..., in] bfloat16; packed: by `pack`; bias: [out] float32. Returns [..., out]."""
    num_in = x.shape[-1]
    rows = _rows(x)
    y = x.new_empty(*x.shape[:-1], num_out)
    _load().linear(
        rows.data_ptr(),
        rows.shape[0],
        rows.stride(0),
        packed.data_ptr(),
        num_out,
        num_in,
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def gated_mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, num_hidden: int, down: torch.Tensor, num_out: int
) -> torch.Tensor:
    """`down(silu(gate x) * up x)`. x: [..., in]; gate, up: packed [hidden, in]; down: packed [out, hidden]."""
    rows = _rows(x).contiguous()
    hidden = x.new_empty(rows.shape[0], num_hidden)
    y = x.new_empty(*x.shape[:-1], num_out)
    _load().gated_mlp(
        rows.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        gate.data_ptr(),
        up.data_ptr(),
        num_hidden,
        down.data_ptr(),
        num_out,
        hidden.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, rounded as the plain modules round. gate, up: [rows, n] contiguous. Returns [rows, n]."""
    h = torch.empty_like(gate)
    _load().silu_times(
        gate.data_ptr(), up.data_ptr(), gate.shape[0], gate.shape[1], h.data_ptr(), torch.get_num_threads()
    )
    return h


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`weight * bf16(x / sqrt(mean(x²) + epsilon))` over the last axis, which 16 divides. weight: [H] bfloat16."""
    x = x.contiguous()
    width = x.shape[-1]
    y = torch.empty_like(x)
    _load().rms_norm(
        x.data_ptr(), x.numel() // width, width, weight.data_ptr(), epsilon, y.data_ptr(), torch.get_num_threads()
    )
    return y


def rotate(x: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn the first `num_heads` heads of each row of x by the row's angles, in place.

    x: [T, columns] contiguous; cos, sin: [T, D] contiguous, both halves of D alike in meaning; 32 divides D.
    """
    _load().rotate(
        x.data_ptr(),
        x.shape[0],
        x.stride(0),
        num_heads,
        cos.shape[1],
        cos.data_ptr(),
        sin.data_ptr(),
        torch.get_num_threads(),
    )


def decoder_layer(
    layer: DecoderLayer,
    attention: NativeAttention,
    adapters: AdapterStep,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """What norm, attention, residual, norm, gated MLP and residual make of x, in one call.

    x: [1, T, H]; cos, sin: [T, D]; all contiguous. Returns [1, T, H].
    """
    num_rows = x.shape[1]
    y = torch.empty_like(x)
    scratch = x.new_empty(num_rows * layer.scratch_width)
    _load().decoder_layer(
        layer,
        attention.function,
        attention.layer,
        attention.step,
        adapters,
        x.data_ptr(),
        num_rows,
        min(num_rows, attention.num_tokens),
        cos.data_ptr(),
        sin.data_ptr(),
        scratch.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, in] with neighbouring elements side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _has_instructions() -> bool:
    """Whether the processor multiplies pairs of bfloat16 in 512-bit vectors."""
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
