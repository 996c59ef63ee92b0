"""The card's own speeds: bandwidth, matrix products, copies from the host."""

import torch
from torch.nn import functional

from benchmarks.cuda.setup import LlamaShape, Setup, Speeds
from benchmarks.cuda.timing import seconds_of

ROWS = (64, 512, 2048, 8192)
"""Rows of matrix products: a full batch that decodes, up to long prompts."""
SMOKE_ROWS = (4,)


def measured(setup: Setup, shape: LlamaShape | None = None) -> Speeds:
    """In a second or two, so that every part can measure the card that it runs on."""
    device = torch.device(setup.device)
    rates = matmuls(setup, shape or setup.large, ROWS[-2:] if setup.is_cuda else SMOKE_ROWS)
    return Speeds(_copy(setup, device), _read(setup, device), max(rates.values()), _upload(setup, device))


def matmuls(setup: Setup, shape: LlamaShape, rows: tuple[int, ...]) -> dict[str, float]:
    """Operations per second of each matrix product of a layer and of the head, on random numbers, by rows."""
    device, dtype = torch.device(setup.device), getattr(torch, setup.dtype)
    kinds = sorted({*shape.linears, (shape.vocabulary, shape.hidden)})
    found = {}
    for num_out, num_in in kinds:
        weight = torch.randn(num_out, num_in, device=device, dtype=dtype)
        for num_rows in rows:
            x = torch.randn(num_rows, num_in, device=device, dtype=dtype)
            seconds = seconds_of(lambda x=x, w=weight: functional.linear(x, w), device, setup.repeats)  # type: ignore[misc]
            found[f"{num_rows} x {num_in} x {num_out}"] = 2 * num_rows * num_out * num_in / seconds
    return found


def _copy(setup: Setup, device: torch.device) -> float:
    source, target = (torch.ones(setup.bytes_copied, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * setup.bytes_copied / seconds_of(lambda: target.copy_(source), device, setup.repeats)


def _read(setup: Setup, device: torch.device) -> float:
    block = torch.ones(setup.bytes_copied // 4, device=device)
    return 4 * block.numel() / seconds_of(block.sum, device, setup.repeats)


def _upload(setup: Setup, device: torch.device) -> float:
    num_bytes = setup.bytes_copied // 8
    source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return num_bytes / seconds_of(lambda: target.copy_(source, non_blocking=True), device, setup.repeats)
