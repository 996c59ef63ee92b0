"""Filters: which tokens of a law may be drawn. Each is a threshold per row, so equal scores stay or go together.

Works on scores whose excluded tokens are already -inf; each filter sees the law that the one before it left. Knows
nothing of requests. No sum here depends on how many rows there are, so a row gets the same bits in any batch.
"""

import torch

EXCLUDED = float("-inf")


def top_k(scores: torch.Tensor, k: torch.Tensor, k_max: int) -> torch.Tensor:
    """scores: [S, V]; k: [S, 1] int64, ≥ 1; k_max: at least the largest. Keep the k highest of each row."""
    k_max = min(k_max, scores.shape[1])
    highest = scores.topk(k_max, dim=-1).values
    return _drop_below(scores, highest.gather(1, k.clamp(max=k_max) - 1))


def top_p(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; mass: [S, 1]. Keep the fewest highest tokens of each row that together reach `mass`."""
    ordered = scores.sort(dim=-1, descending=True).values
    below = torch.softmax(ordered, dim=-1).cumsum(-1)
    last = (below < mass).sum(-1, keepdim=True).clamp_(max=scores.shape[1] - 1)
    return _drop_below(scores, ordered.gather(1, last))


def min_p(scores: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; log_ratio: [S, 1]. Keep tokens at least exp(log_ratio) times as likely as the likeliest."""
    return _drop_below(scores, scores.amax(-1, keepdim=True) + log_ratio)


def typical_p(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; mass: [S, 1]. Keep the fewest tokens whose surprise is nearest the entropy, reaching `mass`."""
    log_law = torch.log_softmax(scores, dim=-1)
    law = log_law.exp()
    surprise = torch.where(law > 0, -log_law, 0.0)
    entropy = (law * surprise).cumsum(-1)[:, -1:]
    distance = (-log_law - entropy).abs_()
    ordered, ids = distance.sort(dim=-1)
    reached = law.gather(1, ids).cumsum(-1)
    last = (reached < mass).sum(-1, keepdim=True).clamp_(max=scores.shape[1] - 1)
    return scores.masked_fill_(distance > ordered.gather(1, last), EXCLUDED)


def _drop_below(scores: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """scores: [S, V], changed in place; threshold: [S, 1]."""
    return scores.masked_fill_(scores < threshold, EXCLUDED)
