"""An independent implementation of sampling: distributions by numpy in float64, noise by Python's integers.

`Case` names the parameters in the words of the request, so that a test states a case once for oracle and sampler.
"""

from dataclasses import dataclass

import numpy as np
import torch

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Case:
    """What is done to a row of logits, for one request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    min_tokens_stop_ids: tuple[int, ...] = ()


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def excluded(case: Case, output: list[int], vocab_size: int) -> set[int]:
    """The tokens that cannot follow this output."""
    found = set(range(vocab_size)) - set(case.allowed_ids or range(vocab_size))
    for word in case.bad_words:
        length = len(word) - 1
        if length <= len(output) and tuple(output[len(output) - length :]) == word[:-1]:
            found.add(word[-1])
    if len(output) < case.min_tokens:
        found |= set(case.min_tokens_stop_ids)
    return found


def penalised(logits: np.ndarray, case: Case, prompt: list[int], output: list[int]) -> np.ndarray:
    scores = logits.astype(np.float64).copy()
    scores[list(excluded(case, output, len(scores)))] = -np.inf
    for token, value in case.logit_bias:
        scores[token] += value
    for token in set(prompt) | set(output):
        score = scores[token]
        scores[token] = score * case.repetition_penalty if score < 0 else score / case.repetition_penalty
    for token in set(output):
        scores[token] -= case.frequency_penalty * output.count(token) + case.presence_penalty
    return scores


def distribution(logits: np.ndarray, case: Case, prompt: list[int], output: list[int]) -> np.ndarray:
    """[V]: the probability of each token."""
    p = softmax(penalised(logits, case, prompt, output) / case.temperature)
    if case.top_k:
        p = np.where(p >= np.sort(p)[::-1][min(case.top_k, len(p)) - 1], p, 0)
        p /= p.sum()
    if case.top_p < 1:
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= case.top_p]] = 0
        p /= p.sum()
    if case.min_p > 0:
        p = np.where(p >= case.min_p * p.max(), p, 0)
        p /= p.sum()
    if case.typical_p < 1:
        surprise = np.full(len(p), np.inf)
        surprise[p > 0] = -np.log(p[p > 0])
        entropy = (p[p > 0] * surprise[p > 0]).sum()
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= case.typical_p]] = 0
        p /= p.sum()
    return p


def fit(counts: np.ndarray, p: np.ndarray) -> float:
    """The χ² tail probability of counts under a distribution; 0 where something impossible was drawn."""
    counts, p = counts.ravel(), p.ravel()
    if counts[p == 0].any():
        return 0.0
    total = counts.sum()
    order = np.argsort(p)
    counts, expected = counts[order], p[order] * total
    rare = max(int((expected < 5).sum()), int((np.cumsum(expected) < 5).sum()) + 1)
    counts = np.concatenate([[counts[:rare].sum()], counts[rare:]])
    expected = np.concatenate([[expected[:rare].sum()], expected[rare:]])
    if len(counts) == 1:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(counts) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, torch.tensor(statistic / 2, dtype=torch.float64)))


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def noise_bits(seed: int, position: int, token: int, purpose: int) -> int:
    """The 64 bits behind the noise of one token, as a signed integer."""
    key = mix((mix((seed + purpose * GOLDEN) & MASK) + (position + 1) * GOLDEN) & MASK) | 1
    bits = (mix(((token + 1) * GOLDEN) & MASK) * key) & MASK
    high = bits >> 32
    bits ^= high if bits < 2**63 else high | 0xFFFFFFFF00000000
    bits = (bits * 0xBF58476D1CE4E5B9) & MASK
    return bits - 2**64 if bits >= 2**63 else bits


def log_exponential(seed: int, position: int, token: int) -> float:
    return float(np.log(-np.log1p(-abs(noise_bits(seed, position, token, 1)) / 2**63)))
