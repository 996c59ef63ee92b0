"""Measures the two speeds that determine a machine's limit: matrix products and reads of memory.

python -m benchmarks.serving.machine
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch.nn import functional

from benchmarks.evidence import arguments
from benchmarks.models.limit import LLAMA_200M, Machine, Shape, tokens_per_second

ROWS = (256, 1024, 4096)
"""Rows of a matrix product: from one prompt to a full step."""
REPEATS = 4
READ_BYTES = 1 << 30


def measure(shape: Shape = LLAMA_200M, repeats: int = REPEATS) -> Machine:
    return Machine(flops=best_matmul(shape, repeats), bytes_per_s=best_read(repeats))


def best_matmul(shape: Shape, repeats: int) -> float:
    sizes = {(rows, *linear) for rows in ROWS for linear in shape.linears} | {(4096, 4096, 4096)}
    return max(_matmul(rows, outputs, inputs, repeats) for rows, outputs, inputs in sorted(sizes))


def best_read(repeats: int) -> float:
    # no two pages alike: a host that merges equal pages would answer from its cache
    block = torch.arange(READ_BYTES // 4, dtype=torch.float32)
    return READ_BYTES / best_of(repeats, block.sum)


def _matmul(rows: int, outputs: int, inputs: int, repeats: int) -> float:
    """Operations per second of one product, at its best of `repeats`: in bfloat16, with the weight plain or in oneDNN's
    layout; in float32 on processors for which oneDNN has no products of bfloat16, where other ones are slower.
    """
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    # [rows, inputs] and [outputs, inputs]; one value is as good as another for time
    x = torch.full((rows, inputs), 0.5, dtype=dtype)
    weight = torch.full((outputs, inputs), 0.25, dtype=dtype)
    seconds = best_of(repeats, lambda: functional.linear(x, weight))
    if has_bf16:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        multiply = torch.ops.mkldnn._linear_pointwise
        seconds = min(seconds, best_of(repeats, lambda: multiply(x, packed, None, "none", [], "")))
    return 2 * rows * outputs * inputs / seconds


def best_of(repeats: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of `repeats` calls, after one to warm up."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    arguments.parser(__doc__).parse_args()
    measured = measure()
    limits = {clients: round(tokens_per_second(measured, clients), 1) for clients in (1, 8, 32)}
    print(f"{measured.flops / 1e9:.0f} GFLOP/s, {measured.bytes_per_s / 1e9:.1f} GB/s; tokens/s at most: {limits}")
    print(json.dumps(asdict(measured)))
