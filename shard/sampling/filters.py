"""Filters: which tokens of a law may be drawn. Each is a threshold per row, so equal scores stay or go together.

Works on scores whose excluded tokens are already -inf; each filter sees the law that the one before it left. Knows
nothing of requests. No sum here depends on how many rows there are, so a row gets the same bits in any batch.
"""

from collections.abc import Iterator

import torch

_EXCLUDED = float("-inf")
_FIRST_LOOKS = (256, 4096)
"""How many of the foremost tokens are ordered first on CPU; mostly enough, and far cheaper than ordering them all."""


def top_k(scores: torch.Tensor, k: torch.Tensor, k_max: int) -> torch.Tensor:
    """scores: [S, V]; k: [S, 1] int64, ≥ 1; k_max: at least the largest. Keep the k highest of each row."""
    k_max = min(k_max, scores.shape[1])
    highest = scores.topk(k_max, dim=-1).values
    return _without(scores, scores < highest.gather(1, k.clamp(max=k_max) - 1))


def top_p(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; mass: [S, 1]. Keep the fewest highest tokens of each row that together reach `mass`."""
    log_law = torch.log_softmax(scores, dim=-1)
    for width in _widths(log_law):
        foremost = log_law.topk(width, dim=-1).values
        reached = foremost.exp().cumsum(-1)
        if _suffices(reached, mass, width, log_law):
            break
    last = (reached < mass).sum(-1, keepdim=True).clamp_(max=width - 1)
    return _without(scores, log_law < foremost.gather(1, last))


def min_p(scores: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; log_ratio: [S, 1]. Keep tokens at least exp(log_ratio) times as likely as the likeliest."""
    return _without(scores, scores < scores.amax(-1, keepdim=True) + log_ratio)


def typical_p(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; mass: [S, 1]. Keep the fewest tokens whose surprise is nearest the entropy, reaching `mass`."""
    log_law = torch.log_softmax(scores, dim=-1)
    law = log_law.exp()
    surprise = torch.where(law > 0, -log_law, 0.0)
    entropy = (law * surprise).cumsum(-1)[:, -1:]
    distance = log_law.add_(entropy).abs_()
    for width in _widths(distance):
        foremost, ids = distance.topk(width, dim=-1, largest=False)
        reached = law.gather(1, ids).cumsum(-1)
        if _suffices(reached, mass, width, distance):
            break
    last = (reached < mass).sum(-1, keepdim=True).clamp_(max=width - 1)
    return _without(scores, distance > foremost.gather(1, last))


def _widths(scores: torch.Tensor) -> Iterator[int]:
    """scores: [S, V]. How many foremost tokens to order, first and then if that was too few."""
    vocab_size = scores.shape[1]
    if scores.is_cpu:
        yield from (width for width in _FIRST_LOOKS if width < vocab_size)
    yield vocab_size


def _suffices(reached: torch.Tensor, mass: torch.Tensor, width: int, scores: torch.Tensor) -> bool:
    """reached: [S, width] running mass; mass: [S, 1]; scores: [S, V]. Reads nothing back where all were ordered."""
    return width == scores.shape[1] or bool((reached[:, -1:] >= mass).all())


def _without(scores: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; excluded: [S, V] bool."""
    return torch.where(excluded, _EXCLUDED, scores)
