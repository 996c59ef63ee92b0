"""Records what Triton would launch: kernels with the types, constants and options of each launch, without a device.

Launch functions of the kernels are called with tensors on `meta`; nothing is compiled or computed.
"""
# mypy: allow-untyped-calls

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from lorikeet.shard.system.operators import Operator

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
ALIGNED = 16


@dataclass(frozen=True)
class Launch:
    """What decides which binary runs: two launches that are equal run the same one."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    """Type of each argument; `constexpr` for constants."""
    constants: tuple[tuple[str, object], ...]
    aligned: tuple[int, ...]
    """Indices of addresses and numbers that are multiples of 16."""
    options: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        types = [f"{name}={kind}" for name, kind in self.signature if kind != "constexpr"]
        return f"{self.kernel}({', '.join([*types, *(f'{name}={value}' for name, value in self.constants)])})"


def fingerprint(launches: Iterable[Launch]) -> str:
    """Eight characters that differ where types, constants such as tiles, or options of one of the launches do."""
    return hashlib.sha256(repr(sorted(map(repr, launches))).encode()).hexdigest()[:8]


@dataclass
class Recorded:
    """Launches in their order."""

    launches: list[Launch]
    kernels: dict[str, Any]
    """By name."""
    num_programs: list[int]
    """Number of programs of each launch."""


@contextmanager
def recorded() -> Iterator[Recorded]:
    """Launches inside are recorded in place of run. Our operators run their launch functions on any device."""
    found = Recorded([], {}, [])

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        launch = describe(kernel, args, options)
        found.launches.append(launch)
        found.kernels[launch.kernel] = kernel
        size = 1
        for axis in grid if isinstance(grid, tuple) else (1,):
            size *= axis
        found.num_programs.append(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(Operator, "__call__", lambda op, *args, **named: op.function(*args, **named))
        yield found


def describe(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> Launch:
    """The launch of `kernel` with these arguments, specialised as Triton does."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants, aligned = [], [], []
    for index, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name)
        kind = "constexpr"
        if parameter.is_constexpr or value is None:
            constants.append((parameter.name, getattr(value, "value", value)))
        elif isinstance(value, torch.Tensor):
            kind = "*" + TYPES[value.dtype]
            if value.storage_offset() * value.element_size() % ALIGNED == 0:
                aligned.append(index)
        elif isinstance(value, float):
            kind = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            constants.append((parameter.name, 1))
        else:
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % ALIGNED == 0 and not parameter.do_not_specialize:
                aligned.append(index)
        signature.append((parameter.name, kind))
    return Launch(kernel.fn.__name__, tuple(signature), tuple(constants), tuple(aligned), tuple(sorted(values.items())))
