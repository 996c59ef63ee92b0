"""Scores in order: the highest of each row, the k highest, all; ties between tokens go to the lower id."""

import numpy as np
import torch

_ID_BITS = 32
_BLOCK = 256


def arg_max(scores: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]. Returns [S] the first highest token of each row; a NaN counts as highest.

    On CPU by the highest block of 256 first: the maximum alone runs on vector units, and an arg max does not.
    """
    vocab_size = scores.shape[1]
    if not scores.is_cpu or vocab_size < 2 * _BLOCK:
        return scores.argmax(dim=-1)
    num_blocks = vocab_size // _BLOCK
    whole = num_blocks * _BLOCK
    peaks = scores[:, :whole].unflatten(1, (num_blocks, _BLOCK)).amax(-1)
    if whole < vocab_size:
        peaks = torch.cat([peaks, scores[:, whole:].amax(-1, keepdim=True)], dim=1)
    # [S, 1]; the last block reaches back over its neighbour, where everything is lower
    starts = (peaks.argmax(dim=-1, keepdim=True) * _BLOCK).clamp_(max=vocab_size - _BLOCK)
    block = scores.gather(1, starts + torch.arange(_BLOCK))
    return starts[:, 0] + block.argmax(dim=-1)


def descending(scores: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]. Returns [S, V] the scores of each row from the highest on; numpy orders them on vector units."""
    if not scores.is_cpu:
        return scores.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)


def most_likely(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores: [S, V] float32. Returns [S, k] token ids by falling score."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(scores.shape[1], dtype=torch.long, device=scores.device)
    keys = (ordered.to(torch.long) << _ID_BITS) | (2**_ID_BITS - 1 - ids)
    return (2**_ID_BITS - 1) - (keys.topk(k, dim=-1).values & (2**_ID_BITS - 1))
