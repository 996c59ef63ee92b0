"""The scores that tokens are sampled by, and the noise, in Triton; penalties.py, masks.py and noise.py specify them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import triton
import triton.language as tl

from lorikeet.shard.sampling import noise
from lorikeet.shard.sampling.penalties import PROMPT

NUMBERS, FACTORS, STATS = tl.constexpr(8), tl.constexpr(8), tl.constexpr(8)
"""Columns of the tables of rows (Parameters), and of what `scan` finds in WIDTH tokens."""
SAMPLES, FILTERS, RAW, SHOWN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
"""Flags of a row: its tokens are sampled; some filter applies; the log probability of its token is wanted, by the
model's logits or by the distribution that is sampled from.
"""
NOTHING = tl.constexpr(float("-inf"))
_PROMPT = tl.constexpr(PROMPT)
_GOLDEN, _FIRST, _SECOND = (tl.constexpr(each) for each in (noise.GOLDEN, noise.FIRST, noise.SECOND))
_PURPOSE = tl.constexpr(noise.as_signed(noise.Purpose.DRAW * noise.GOLDEN))
_UNIT, _LOWEST, _HIGHEST = (tl.constexpr(each) for each in (noise.UNIT, noise.LOWEST, noise.HIGHEST))
MOST_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def log_exponentials(tokens, seed, position):
    """noise.log_exponentials of some tokens of one row."""
    key = _mix(_mix(seed + _PURPOSE) + (position + 1) * _GOLDEN) | 1
    bits = _mix((tokens.to(tl.int64) + 1) * _GOLDEN) * key
    bits ^= bits >> 32
    bits *= _FIRST
    x = tl.abs(bits.to(tl.float32)) * -_UNIT
    x = tl.minimum(tl.maximum(x, -_HIGHEST), -_LOWEST)
    whole = 1.0 + x
    # log(1 + x): the rounding of 1 + x is made up for (Kahan)
    shrunk = tl.where(whole == 1.0, -1.0, whole - 1.0)
    log1p = tl.where(whole == 1.0, x, tl.log(whole) * tl.div_rn(x, shrunk))
    return tl.log(-log1p)


@triton.jit
def counts_of(counts, slot, vocab_size):
    """Where the counts of a slot begin."""
    return tl.load(counts).to(tl.pointer_type(tl.int32)) + slot * vocab_size


@triton.jit
def scores_of(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride):
    """The scores of some tokens that the row's tokens are chosen by, before filters; -inf beyond the vocabulary."""
    inside = tokens < vocab_size
    x = tl.load(logits + index * logits_stride + tokens, mask=inside, other=NOTHING).to(tl.float32)
    numbers += row * NUMBERS
    factors += row * FACTORS
    allowed = tl.load(numbers + 4)
    if allowed != 0:
        kept = tl.load(allowed.to(tl.pointer_type(tl.int8)) + tokens, mask=inside, other=0)
        x = tl.where(kept != 0, x, NOTHING)
    changes = tl.load(numbers + 5).to(tl.pointer_type(tl.int64))
    for change in range(tl.load(numbers + 6)):
        token, until = tl.load(changes + change * 3), tl.load(changes + change * 3 + 1)
        added = tl.load(changes + change * 3 + 2).to(tl.int32).to(tl.float32, bitcast=True)
        x = tl.where((tokens == token) & (position < until), x + added, x)
    slot = tl.load(numbers + 3)
    if slot >= 0:
        repetition, frequency, presence = tl.load(factors + 4), tl.load(factors + 5), tl.load(factors + 6)
        known = tl.load(counts_of(counts, slot, vocab_size) + tokens, mask=inside, other=0)
        divided = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * repetition)
        x = tl.where(known != 0, tl.where(x < 0, x * repetition, divided), x)
        known &= _PROMPT - 1
        x -= known.to(tl.float32) * frequency
        x -= tl.minimum(known, 1).to(tl.float32) * presence
    if (tl.load(numbers + 2) & SAMPLES) != 0:
        x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * tl.load(factors))
    return x


@triton.jit
def best_of(values, tokens):
    """The highest value and its token, the first of equal ones."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, tokens, MOST_BITS), 0)
