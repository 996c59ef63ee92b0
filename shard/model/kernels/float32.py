"""float32.c from Python: products in float32 on a CPU, layer norms and GELU, where it can be built."""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

from lorikeet.shard.system.native import CompilerMissing, library

_SOURCE = Path(__file__).with_name("float32.c")
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "pack": [_POINTER, _SIZE, _SIZE, _POINTER],
    "linear": [_POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _INT, _INT],
    "gelu": [_POINTER, _SIZE, _POINTER, _INT],
    "layer_norm": [_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _FLOAT, _POINTER, _INT],
}

logger = logging.getLogger(__name__)


@cache
def _load() -> ctypes.CDLL:
    loaded = library(_SOURCE)
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.block_size.argtypes, loaded.block_size.restype = [], _INT
    return loaded


@cache
def available() -> bool:
    """Whether this machine has a compiler, or kernels compiled for it in advance; logs once why not."""
    try:
        _load()
    except CompilerMissing as reason:
        logger.warning("float32 products run through torch, more slowly: %s", reason)
        return False
    return True


@cache
def block_size() -> int:
    """Outputs per block of a packed matrix; it divides the width of rows that `layer_norm` takes."""
    return int(_load().block_size())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out, in] float32. Returns [blocks * block_size() * in], opaque."""
    weight = weight.contiguous()
    num_out, num_in = weight.shape
    packed = torch.empty(-(-num_out // block_size()) * block_size() * num_in)
    _load().pack(weight.data_ptr(), num_out, num_in, packed.data_ptr())
    return packed


def linear(
    x: torch.Tensor, packed: torch.Tensor, num_out: int, bias: torch.Tensor | None, is_gelu: bool = False
) -> torch.Tensor:
    """x: [..., in] float32; packed: by `pack`; bias: [out]. Returns [..., out], or GELU of it."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows, num_in = rows.shape
    y = x.new_empty(*x.shape[:-1], num_out)
    _load().linear(
        rows.data_ptr(), num_rows, rows.stride(0), packed.data_ptr(), num_out, num_in,
        None if bias is None else bias.data_ptr(), y.data_ptr(), is_gelu, torch.get_num_threads(),
    )  # fmt: skip
    return y


def gelu(x: torch.Tensor) -> torch.Tensor:
    """`x (1 + erf(x / √2)) / 2`. x: any shape, float32."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _load().gelu(x.data_ptr(), x.numel(), y.data_ptr(), torch.get_num_threads())
    return y


def layer_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """The layer norm of `x + added`, or of x. x, added: [..., H] float32; weight, bias: [H]; block_size() divides H."""
    x = x.contiguous()
    added = None if added is None else added.contiguous()
    width = x.shape[-1]
    y = torch.empty_like(x)
    _load().layer_norm(
        x.data_ptr(), None if added is None else added.data_ptr(), x.numel() // width, width, weight.data_ptr(),
        None if bias is None else bias.data_ptr(), epsilon, y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y
