"""Filters in Triton, of tokens in a buffer and of whole rows: filters.py is the specification.

Every filter is a threshold, found by bisecting the bits of float32, so that nothing is sorted.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import triton
import triton.language as tl

from lorikeet.shard.sampling.scores_triton import (
    FACTORS,
    MOST_BITS,
    NOTHING,
    NUMBERS,
    SHOWN,
    best_of,
    log_exponentials,
    scores_of,
)  # fmt: skip

STEP = tl.constexpr(0.25)
"""Distance from a row's maximum by which tokens are counted; the last of the steps has all that are further away."""
MARGIN = tl.constexpr(1.00001)
"""So that rounding of a sum excludes no token from the buffer."""


@triton.jit
def steps_below(most, x, STEPS: tl.constexpr):
    """In which step below the row's maximum each score is."""
    return tl.maximum(tl.minimum((most - x) / STEP, STEPS - 1.0), 0.0).to(tl.int32)


@triton.jit
def last_step(sizes, num_pieces, ROOM: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr):
    """The last step down to which all tokens fit into the buffer, -1 for none, and how many these are.

    sizes: [pieces, STEPS] int32 tokens in each step.
    """
    steps, pieces = tl.arange(0, STEPS), tl.arange(0, PIECES)
    places = sizes + pieces[:, None] * STEPS + steps[None, :]
    within = tl.cumsum(tl.sum(tl.load(places, mask=(pieces < num_pieces)[:, None], other=0), 0), 0)
    last = tl.sum((within <= ROOM).to(tl.int32), 0) - 1
    return last, tl.sum(tl.where(steps == last, within, 0), 0)


@triton.jit
def lowest_near(most, last, STEPS: tl.constexpr):
    """The score below which a token is in a later step."""
    return tl.where(last == STEPS - 1, NOTHING, most - STEP * (last + 1))


@triton.jit
def holds_first_filter(last, size, mass, total, numbers, factors, STEPS: tl.constexpr):
    """Whether the buffer has every token that the row's first filter keeps. mass: of the buffer; total: of the row."""
    top_k, top_p, log_min_p = tl.load(numbers + 1), tl.load(factors + 1), tl.load(factors + 2)
    if top_k > 0:
        holds = size >= top_k
    elif top_p < 1.0:
        holds = mass >= top_p * total * MARGIN
    else:
        holds = (log_min_p == NOTHING) | (STEP * (last + 1) >= -log_min_p * MARGIN)
    return (last >= 0) & (holds | (last == STEPS - 1))


@triton.jit
def ordered_bits(x):
    """int32 in the order of float32."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & MOST_BITS)


@triton.jit
def _middle(low, high):
    return ((low + high + 1) >> 1).to(tl.int32)


@triton.jit
def _threshold(ordered, weights, wanted):
    """The highest integer such that the weights of those not below it reach `wanted`; the lowest if there is none."""
    low, high = tl.full((), -2147483648, tl.int64), tl.full((), 2147483647, tl.int64)
    for _bit in range(32):
        middle = _middle(low, high)
        reaches = tl.sum(tl.where(ordered >= middle, weights, 0.0), 0) >= wanted
        low = tl.where(reaches, middle.to(tl.int64), low)
        high = tl.where(reaches, high, middle.to(tl.int64) - 1)
    return low.to(tl.int32)


@triton.jit
def nearness(log_probs, entropy):
    """int32 that falls with the distance of the surprise from the entropy."""
    return -(tl.abs(log_probs + entropy).to(tl.int32, bitcast=True))


@triton.jit
def filtered(x, ids, is_there, most, total, entropy, numbers, factors):
    """x: the candidates' scores. Which of them are kept, the sum of theirs, and the least nearness that is kept."""
    top_k, top_p, log_min_p, typical_p = (
        tl.load(numbers + 1), tl.load(factors + 1), tl.load(factors + 2), tl.load(factors + 3)
    )  # fmt: skip
    ordered, weights = tl.where(is_there, ordered_bits(x), -2147483648), tl.where(is_there, tl.exp(x - most), 0.0)
    kept = is_there
    if top_k > 0:
        kept = kept & (ordered >= _threshold(ordered, is_there.to(tl.float32), top_k.to(tl.float32)))
        total = tl.sum(tl.where(kept, weights, 0.0), 0)
    if top_p < 1.0:
        kept = kept & (ordered >= _threshold(ordered, tl.where(kept, weights, 0.0), top_p * total))
        total = tl.sum(tl.where(kept, weights, 0.0), 0)
    if log_min_p > NOTHING:
        kept = kept & (x >= most + log_min_p)
        total = tl.sum(tl.where(kept, weights, 0.0), 0)
    least = tl.full((), -2147483648, tl.int32)
    if typical_p < 1.0:
        log_probs = x - most - tl.log(total)
        probs = tl.where(kept, tl.exp(log_probs), 0.0)
        if (top_k > 0) | (top_p < 1.0) | (log_min_p > NOTHING):
            entropy = -tl.sum(tl.where(probs > 0, log_probs, 0.0) * probs, 0)
        near = tl.where(kept, nearness(log_probs, entropy), -2147483648)
        least = _threshold(near, probs, typical_p)
        kept = kept & (near >= least)
        total = tl.sum(tl.where(kept, weights, 0.0), 0)
    return kept, total, least, entropy


@triton.jit
def _over_row(
    logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride,
    most, threshold, log_total, entropy, least, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sums over the tokens of a whole row whose ordered score reaches `threshold`: their number, sum, and sum of (score
    - maximum) exp(score - maximum); and the probability of those whose nearness reaches `least`.
    """
    size, total, surprise, near = most * 0.0, most * 0.0, most * 0.0, most * 0.0
    for first in range(0, vocab_size, WIDTH):
        tokens = first + tl.arange(0, WIDTH)
        x = scores_of(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
        kept = (ordered_bits(x) >= threshold) & (x > NOTHING)
        weights = tl.where(kept, tl.exp(x - most), 0.0)
        size += tl.sum(kept.to(tl.float32), 0)
        total += tl.sum(weights, 0)
        surprise += tl.sum(tl.where(weights > 0, x - most, 0.0) * weights, 0)
        is_near = kept & (nearness(x - most - log_total, entropy) >= least)
        near += tl.sum(tl.where(is_near, tl.exp(x - most - log_total), 0.0), 0)
    return size, total, surprise, near


@triton.jit
def filter_row(
    logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most, WIDTH: tl.constexpr,
):  # fmt: skip
    """`filtered` of a whole row but for its last filter by mass, unless the row's total is shown: `draw_from_row` does
    without that threshold. A threshold takes a pass over the row for every bit.

    Returns thresholds of the ordered score and of the nearness, log of the sum and entropy for the latter, the sum of
    what is kept, and the mass that the last filter keeps, infinity where there is none left.
    """
    own, of = numbers + row * NUMBERS, factors + row * FACTORS
    top_k, top_p, log_min_p, typical_p = tl.load(own + 1), tl.load(of + 1), tl.load(of + 2), tl.load(of + 3)
    is_shown = (tl.load(own + 2) & SHOWN) != 0
    lowest = tl.full((), -2147483648, tl.int32)
    threshold, least, entropy, log_total = lowest, lowest, most * 0.0, most * 0.0
    wanted = most * 0.0 + float("inf")
    size, total, surprise, near = _over_row(
        logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
        threshold, log_total, entropy, least, WIDTH,
    )  # fmt: skip
    for kind in range(3):  # top_k, top_p, typical_p
        is_used = ((kind == 0) & (top_k > 0)) | ((kind == 1) & (top_p < 1.0)) | ((kind == 2) & (typical_p < 1.0))
        is_last = ((kind == 1) & (typical_p >= 1.0)) | (kind == 2)
        if (kind == 2) & is_used:
            if log_min_p > NOTHING:
                threshold = tl.maximum(threshold, ordered_bits(most + log_min_p))
                size, total, surprise, near = _over_row(
                    logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
                    threshold, log_total, entropy, least, WIDTH,
                )  # fmt: skip
            log_total = tl.log(total)
            entropy = log_total - tl.div_rn(surprise, total)
        if is_used & is_last & (is_shown == 0):
            wanted = tl.where(kind == 1, top_p, typical_p) * total
        elif is_used:
            low, high = tl.full((), -2147483648, tl.int64), tl.full((), 2147483647, tl.int64)
            for _bit in range(32):
                middle = _middle(low, high)
                size, mass, _spread, near = _over_row(
                    logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
                    tl.where(kind == 2, threshold, tl.maximum(threshold, middle)), log_total, entropy, middle, WIDTH,
                )  # fmt: skip
                reaches = near >= typical_p
                if kind == 0:
                    reaches = size >= top_k.to(tl.float32)
                if kind == 1:
                    reaches = mass >= top_p * total
                low = tl.where(reaches, middle.to(tl.int64), low)
                high = tl.where(reaches, high, middle.to(tl.int64) - 1)
            if kind == 2:
                least = low.to(tl.int32)
            else:
                threshold = tl.maximum(threshold, low.to(tl.int32))
            size, total, surprise, near = _over_row(
                logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
                threshold, log_total, entropy, lowest, WIDTH,
            )  # fmt: skip
    return tl.maximum(threshold, ordered_bits(most + log_min_p)), least, log_total, entropy, wanted


@triton.jit
def draw_from_row(
    logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
    threshold, least, log_total, entropy, pivot, IS_TYPICAL, WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw from the tokens that are kept and come before `pivot` in the order of the last filter. Returns the token
    of the best value, its place in that order, and the sum. The order is that of nearness with IS_TYPICAL, else of
    scores, the highest first.
    """
    seed = tl.load(numbers + row * NUMBERS)
    best, token, total = most * 0.0 + NOTHING, tl.full((), 0, tl.int32), most * 0.0
    place = tl.full((), -2147483648, tl.int32)
    for first in range(0, vocab_size, WIDTH):
        tokens = first + tl.arange(0, WIDTH)
        x = scores_of(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
        ordered, near = ordered_bits(x), nearness(x - most - log_total, entropy)
        kept = (ordered >= threshold) & (x > NOTHING) & ((near >= least) | (IS_TYPICAL == 0))
        order = tl.where(IS_TYPICAL != 0, near, ordered)
        kept = kept & (order > pivot)
        total += tl.sum(tl.where(kept, tl.exp(x - most), 0.0), 0)
        values = tl.where(kept, x - log_exponentials(tokens, seed, position), NOTHING)
        here, its_token = best_of(values, tokens)
        its_place = tl.max(tl.where(tokens == its_token, order, -2147483648), 0)
        token, place = tl.where(here > best, its_token, token), tl.where(here > best, its_place, place)
        best = tl.maximum(best, here)
    return token, place, total
