"""What the card can do at most: bandwidths, the best product, and what cuBLAS reaches with few rows."""

from functools import partial

import torch

from benchmarks.cuda import speeds
from benchmarks.cuda.check.rows import Row, Rows, ceilings
from benchmarks.cuda.setup import Setup


def measure(rows: Rows, setup: Setup, is_brief: bool) -> None:
    rows.check("card", lambda: _rates(setup))
    for count in (1, 8, 64) if setup.is_cuda else (4,):
        rows.check(f"products of {count} rows", partial(_products, rows, setup, count))


def _rates(setup: Setup) -> Row:
    found = speeds.measured(setup)
    name = torch.cuda.get_device_name(setup.device) if setup.is_cuda else "CPU"
    return {
        "copy_gbs": found.copy / 1e9, "read_gbs": found.read / 1e9, "upload_gbs": found.upload / 1e9,
        "tflops": found.flops / 1e12, "card": name, "torch": torch.__version__,
    }  # fmt: skip


def _products(rows: Rows, setup: Setup, count: int) -> Row:
    """All matrices of a layer and the head together."""
    seconds = num_bytes = 0.0
    for name, rate in speeds.matmuls(setup, setup.large, (count,)).items():
        num_rows, num_in, num_out = map(int, name.split(" x "))
        seconds += 2 * num_rows * num_in * num_out / rate
        num_bytes += num_in * num_out * getattr(torch, setup.dtype).itemsize
    return {
        "gbs": num_bytes / seconds / 1e9,
        "share_of_copy": num_bytes / seconds / 1e9 / ceilings(rows.out)["copy_gbs"],
    }
