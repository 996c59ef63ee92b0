"""Filters: which tokens of a distribution may be sampled. Each is a threshold per row, so equal scores are kept or
excluded together.

Works on scores whose excluded tokens are already -inf; each filter sees the distribution that the one before it left.
No sum here depends on how many rows there are, so a row gets the same bits in any batch.
"""

import numpy as np
import torch

FIRST_CHECK = 128
"""Highest tokens that are ordered first on CPU; mostly enough, and far cheaper than ordering all."""
_EXCLUDED = float("-inf")
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


def top_k(scores: torch.Tensor, k: torch.Tensor, k_max: int) -> torch.Tensor:
    """scores: [S, V]; k: [S, 1] int64, ≥ 1; k_max: at least the largest. Keep the k highest of each row."""
    k_max = min(k_max, scores.shape[1])
    highest = scores.topk(k_max, dim=-1).values
    return _without(scores, scores < highest.gather(1, k.clamp(max=k_max) - 1))


def top_p(scores: torch.Tensor, mass: torch.Tensor, first_check: int = FIRST_CHECK) -> torch.Tensor:
    """scores: [S, V]; mass: [S, 1]. Keep the fewest highest tokens of each row that together reach `mass`.

    `first_check` changes how long it takes and nothing else.
    """
    log_distribution = torch.log_softmax(scores, dim=-1)
    is_checked = _may_check(log_distribution, first_check)
    foremost = log_distribution.topk(first_check).values if is_checked else _descending(log_distribution)
    reached = foremost.exp().cumsum(-1)
    if not _suffices(reached, mass, scores.shape[1]):
        foremost = _descending(log_distribution)
        reached = foremost.exp().cumsum(-1)
    return _without(scores, log_distribution < _where_reached(foremost, reached, mass))


def min_p(scores: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; log_ratio: [S, 1]. Keep tokens at least exp(log_ratio) times as likely as the likeliest."""
    return _without(scores, scores < scores.amax(-1, keepdim=True) + log_ratio)


def typical_p(scores: torch.Tensor, mass: torch.Tensor, first_check: int = FIRST_CHECK) -> torch.Tensor:
    """scores: [S, V]; mass: [S, 1]. Keep the fewest tokens whose surprise is nearest the entropy, reaching `mass`.

    `first_check` changes how long it takes and nothing else.
    """
    vocab_size = scores.shape[1]
    log_distribution = torch.log_softmax(scores, dim=-1)
    distribution = log_distribution.exp()
    surprise = torch.where(distribution > 0, -log_distribution, 0.0)
    entropy = (distribution * surprise).cumsum(-1)[:, -1:]
    distance = log_distribution.add_(entropy).abs_()
    foremost, ids = distance.topk(first_check if _may_check(distribution, first_check) else vocab_size, largest=False)
    reached = distribution.gather(1, ids).cumsum(-1)
    if not _suffices(reached, mass, vocab_size):
        foremost, ids = distance.sort(dim=-1)
        reached = distribution.gather(1, ids).cumsum(-1)
    return _without(scores, distance > _where_reached(foremost, reached, mass))


def _may_check(scores: torch.Tensor, first_check: int) -> bool:
    """scores: [S, V]. Whether to order a few first: only where the answer can be read without waiting."""
    return scores.is_cpu and first_check < scores.shape[1]


def _suffices(reached: torch.Tensor, mass: torch.Tensor, vocab_size: int) -> bool:
    """reached: [S, width] running mass; mass: [S, 1]. Reads nothing back where all were ordered."""
    return reached.shape[1] == vocab_size or bool((reached[:, -1:] >= mass).all())


def _where_reached(foremost: torch.Tensor, reached: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """foremost: [S, width] values in order; reached: [S, width] running mass; mass: [S, 1]. Returns [S, 1]."""
    last = (reached < mass).sum(-1, keepdim=True).clamp_(max=reached.shape[1] - 1)
    return foremost.gather(1, last)


def _without(scores: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; excluded: [S, V] bool."""
    return torch.where(excluded, _EXCLUDED, scores)


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]. Returns [S, V] the scores of each row from the highest on; numpy orders them on vector units."""
    if not scores.is_cpu:
        return scores.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
