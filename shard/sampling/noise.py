"""The noise of sampling: a hash of (seed, position, token id, purpose) and nothing else.

So a request samples the same token alone, in any batch, under any filter, after a preemption and on another shard.

The hash works on wrapping 64-bit integers. Each token id has a fixed, well-mixed word and each (seed, position,
purpose) a well-mixed odd key; their product, folded and multiplied once more, is the noise of that token there.
"""

from enum import IntEnum

import torch

GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd
FIRST = -4658895280553007687  # the two multipliers of the splitmix64 finalizer
SECOND = -7723592293110705685
UNIT = 2.0**-63
LOWEST = 2.0**-64
HIGHEST = 1.0 - 2.0**-24


class Purpose(IntEnum):
    """The use of noise; equal seeds and positions give unrelated noise for different purposes."""

    DRAW = 1
    GREEN_LIST = 2
    DRAFT = 3
    """Noise for the samples of a draft model under the rejection rule."""
    ACCEPT = 4
    """Noise that decides whether they are accepted."""
    RESIDUAL = 5
    """Noise for the target's own samples where they are not."""


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x: int64, any shape. Shift right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """x: int64, any shape. A bijection of 64-bit integers in which every input bit reaches every output bit."""
    x = (x ^ _logical_shift(x, 30)) * FIRST
    x = (x ^ _logical_shift(x, 27)) * SECOND
    return x ^ _logical_shift(x, 31)


def as_signed(value: int) -> int:
    """The signed 64-bit integer with the bits of an unsigned one."""
    return (value + 2**63) % 2**64 - 2**63


def token_words(vocab_size: int, device: torch.device) -> torch.Tensor:
    """[V] int64: the word of each token id."""
    return mix((torch.arange(vocab_size, dtype=torch.long, device=device) + 1) * GOLDEN)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """seeds, positions: [S] int64. Returns [S] int64, odd: the key of each row."""
    keys = mix(seeds + as_signed(purpose * GOLDEN))
    return mix(keys + (positions + 1) * GOLDEN) | 1


def hash_bits(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """words: [V] int64 by token id; keys: [S] int64. Returns [S, V] int64, uniform over all 64-bit integers.

    The fold shifts arithmetically, which spares a pass: it loses one of the 64 bits of state.
    """
    bits = words * keys[:, None]
    bits ^= bits >> 32
    bits *= FIRST
    return bits


def uniforms(keys: torch.Tensor) -> torch.Tensor:
    """keys: [S] int64. Returns [S] float64 in [0, 1)."""
    return _logical_shift(mix(keys), 11).to(torch.float64) * 2.0**-53


def log_exponentials(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """words: [V] int64; keys: [S] int64. Returns [S, V] float32: logs of independent standard exponentials.

    The negative of one is Gumbel noise. A small exponential, which is what wins, is resolved down to 2^-64.
    """
    noise = hash_bits(words, keys).to(torch.float32).abs_().mul_(-UNIT)
    return noise.clamp_(min=-HIGHEST, max=-LOWEST).log1p_().neg_().log_()
