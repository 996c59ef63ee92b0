"""The layout of targets.c in operations of torch: the specification of its `pack`."""

from dataclasses import replace

import torch
from torch.nn import functional

from lorikeet.shard.model.lora.targets import OUT_BLOCK, RANK_BLOCK, SlotWeights, compiled


def packed(weights: SlotWeights, is_embedding: bool = False) -> SlotWeights:
    """Weights in the layout of targets.c; unchanged where there is no compiled code."""
    a, b = weights.a, weights.b
    if a is None or b is None or a.device.type != "cpu" or compiled(a.dtype) is None:
        return weights
    rank = _up(a.shape[0], RANK_BLOCK)
    a = _padded(a, rank, a.shape[1])
    if is_embedding:
        a = a.t().contiguous()
    else:
        step = 64 // a.element_size()
        a = _padded(a, rank, _up(a.shape[1], step)).view(rank // RANK_BLOCK, RANK_BLOCK, -1, step)
        a = a.transpose(1, 2).contiguous()
    b = _padded(b, rank, _up(b.shape[1], OUT_BLOCK)).view(rank, -1, OUT_BLOCK)
    return replace(weights, a=a, b=b.transpose(0, 1).contiguous(), is_packed=True)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _padded(matrix: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """matrix: [rows, columns]. Returns [num_rows, num_columns], zeros beyond."""
    return functional.pad(matrix, (0, num_columns - matrix.shape[1], 0, num_rows - matrix.shape[0]))
