"""Sampling on CUDA: tokens of many rows by four launches, none of which writes a value for every token.

`scan` reads each row once: maximum, sum and, of rows without filters, the arg max with noise. Of rows with filters
`measure` counts the tokens within a few distances from the maximum and adds up their probabilities, `collect` puts the
tokens within one of these distances into a buffer, and `resolve` applies the filters to the buffer. filters.py,
penalties.py, masks.py and noise.py are the specification. Every filter is a threshold, found by bisecting the bits of
float32: so no value is sorted. Where the buffer is too small, `resolve` does the same with the whole row, and says so.
Bits: a row's sums have an order that depends on the vocabulary alone, so its token is the same in any batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lorikeet.shard.sampling import noise
from lorikeet.shard.sampling.penalties import PROMPT

WIDTH = 4096
"""Tokens of a program."""
ROOM = 4096
"""Tokens of a row to which filters are applied without reading the row again."""
DISTANCES = 32
"""Distances from the maximum that are tried for the buffer."""
DISTANCE = tl.constexpr(0.5)
"""Between two of them; the last is infinite."""
MARGIN = tl.constexpr(1.00001)
"""So that rounding of a sum excludes no token from the buffer."""
NUMBERS, FACTORS, STATS = tl.constexpr(8), tl.constexpr(8), tl.constexpr(8)
"""Columns of the tables of rows (Parameters), and of what `scan` finds in WIDTH tokens."""
SAMPLES, FILTERS, RAW, SHOWN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
"""Flags of a row: its tokens are sampled; some filter applies; the log probability of its token is wanted, by the
model's logits or by the distribution that is sampled from.
"""
_NOTHING = tl.constexpr(float("-inf"))
_PROMPT = tl.constexpr(PROMPT)
_GOLDEN, _FIRST, _SECOND = (tl.constexpr(each) for each in (noise.GOLDEN, noise.FIRST, noise.SECOND))
_PURPOSE = tl.constexpr(noise.as_signed(noise.Purpose.DRAW * noise.GOLDEN))
_UNIT, _LOWEST, _HIGHEST = (tl.constexpr(each) for each in (noise.UNIT, noise.LOWEST, noise.HIGHEST))
_MOST_BITS = tl.constexpr(0x7FFFFFFF)


class Parameters(NamedTuple):
    """What the device knows of each row."""

    # [max_rows, NUMBERS] int64: seed, top_k (0: off), flags, row of the counts (-1: none), address of [V] bool of the
    # allowed tokens (0: all), address and number of its changes
    numbers: torch.Tensor
    # [max_rows, FACTORS] float32: temperature, top_p (1: off), log min_p (-inf: off), typical_p (1: off), repetition,
    # frequency and presence penalties
    factors: torch.Tensor
    # [slots, V] int32
    counts: torch.Tensor
    # [max_rows] int64 newest token of each row
    last_tokens: torch.Tensor


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _log_exponentials(tokens, seed, position):
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
def _scores(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride):
    """The scores of some tokens that the row's tokens are chosen by, before filters; -inf beyond the vocabulary."""
    inside = tokens < vocab_size
    x = tl.load(logits + index * logits_stride + tokens, mask=inside, other=_NOTHING).to(tl.float32)
    numbers += row * NUMBERS
    factors += row * FACTORS
    allowed = tl.load(numbers + 4)
    if allowed != 0:
        kept = tl.load(allowed.to(tl.pointer_type(tl.int8)) + tokens, mask=inside, other=0)
        x = tl.where(kept != 0, x, _NOTHING)
    changes = tl.load(numbers + 5).to(tl.pointer_type(tl.int64))
    for change in range(tl.load(numbers + 6)):
        token, until = tl.load(changes + change * 3), tl.load(changes + change * 3 + 1)
        added = tl.load(changes + change * 3 + 2).to(tl.int32).to(tl.float32, bitcast=True)
        x = tl.where((tokens == token) & (position < until), x + added, x)
    slot = tl.load(numbers + 3)
    if slot >= 0:
        repetition, frequency, presence = tl.load(factors + 4), tl.load(factors + 5), tl.load(factors + 6)
        known = tl.load(counts + slot * vocab_size + tokens, mask=inside, other=0)
        divided = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * repetition)
        x = tl.where(known != 0, tl.where(x < 0, x * repetition, divided), x)
        known &= _PROMPT - 1
        x -= known.to(tl.float32) * frequency
        x -= tl.minimum(known, 1).to(tl.float32) * presence
    if (tl.load(numbers + 2) & SAMPLES) != 0:
        x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * tl.load(factors))
    return x


@triton.jit
def _best(values, tokens):
    """The highest value and its token, the first of equal ones."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, tokens, _MOST_BITS), 0)


@triton.jit
def scan(
    logits, indices, rows, positions, numbers, factors, counts, stats, vocab_size, logits_stride, WIDTH: tl.constexpr,
):  # fmt: skip
    """stats[row, program]: maximum, sum of exp(score - maximum), best value and its token, the same maximum and sum of
    the logits, whether there is a NaN, sum of (score - maximum) exp(score - maximum).
    """
    place, piece = tl.program_id(0), tl.program_id(1)
    index, row = tl.load(indices + place), tl.load(rows + place)
    position = tl.load(positions + index)
    tokens = piece * WIDTH + tl.arange(0, WIDTH)
    x = _scores(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
    flags = tl.load(numbers + row * NUMBERS + 2)
    most = tl.max(x, 0)
    distances = x - tl.where(most == _NOTHING, 0.0, most)
    weights = tl.exp(distances)
    values = x
    if (flags & (SAMPLES | FILTERS)) == SAMPLES:
        values = x - _log_exponentials(tokens, tl.load(numbers + row * NUMBERS), position)
    best, token = _best(values, tokens)
    raw_most, raw_total = most, most
    if (flags & RAW) != 0:
        raw = tl.load(logits + index * logits_stride + tokens, mask=tokens < vocab_size, other=_NOTHING).to(tl.float32)
        raw_most = tl.max(raw, 0)
        raw_total = tl.sum(tl.exp(raw - tl.where(raw_most == _NOTHING, 0.0, raw_most)), 0)
    place = stats + (place * tl.num_programs(1) + piece) * STATS
    tl.store(place, most)
    tl.store(place + 1, tl.sum(weights, 0))
    tl.store(place + 2, best)
    tl.store(place + 3, token.to(tl.float32))
    tl.store(place + 4, raw_most)
    tl.store(place + 5, raw_total)
    tl.store(place + 6, tl.max((x != x).to(tl.float32), 0))
    tl.store(place + 7, tl.sum(tl.where(weights > 0, distances, 0.0) * weights, 0))


@triton.jit
def _highest(stats, pieces, num_pieces):
    """The maximum over all pieces of a row."""
    return tl.max(tl.load(stats + pieces * STATS, mask=pieces < num_pieces, other=_NOTHING), 0)


@triton.jit
def measure(
    logits, indices, rows, positions, numbers, factors, counts, stats, measures, vocab_size, logits_stride,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, DISTANCES: tl.constexpr,
):  # fmt: skip
    """measures[row, program, distance]: number of tokens within the distance from the row's maximum, and their sum."""
    place, piece, num_pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + place)
    if (tl.load(numbers + row * NUMBERS + 2) & FILTERS) == 0:
        return
    index = tl.load(indices + place)
    position = tl.load(positions + index)
    most = _highest(stats + place * num_pieces * STATS, tl.arange(0, PIECES), num_pieces)
    tokens = piece * WIDTH + tl.arange(0, WIDTH)
    x = _scores(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
    weights = tl.exp(x - most)
    measures += (place * num_pieces + piece) * DISTANCES * 2
    for step in range(DISTANCES):
        lowest = tl.where(step == DISTANCES - 1, _NOTHING, most - DISTANCE * (step + 1))
        near = (x >= lowest) & (x > _NOTHING)
        tl.store(measures + step * 2, tl.sum(near.to(tl.float32), 0))
        tl.store(measures + step * 2 + 1, tl.sum(tl.where(near, weights, 0.0), 0))


@triton.jit
def _bound(measures, numbers, factors, num_pieces, ROOM: tl.constexpr, PIECES: tl.constexpr, DISTANCES: tl.constexpr):
    """Which distance holds every token that the row's first filter keeps, and how many tokens it holds in all."""
    steps, pieces = tl.arange(0, DISTANCES), tl.arange(0, PIECES)
    places = measures + (pieces[:, None] * DISTANCES + steps[None, :]) * 2
    mask = (pieces < num_pieces)[:, None]
    sizes = tl.sum(tl.load(places, mask=mask, other=0.0), 0)
    masses = tl.sum(tl.load(places + 1, mask=mask, other=0.0), 0)
    is_last = steps == DISTANCES - 1
    total = tl.sum(tl.where(is_last, masses, 0.0), 0)
    top_k, top_p, log_min_p = tl.load(numbers + 1), tl.load(factors + 1), tl.load(factors + 2)
    if top_k > 0:
        suffices = sizes >= top_k.to(tl.float32)
    elif top_p < 1.0:
        suffices = masses >= top_p * total * MARGIN
    elif log_min_p > _NOTHING:
        suffices = DISTANCE * (steps + 1) * MARGIN >= -log_min_p * MARGIN * MARGIN
    else:  # what typical_p keeps is not the highest: as many as there is room for
        suffices = sizes > ROOM
    chosen = tl.min(tl.where(suffices | is_last, steps, DISTANCES), 0)
    if (top_k <= 0) & (top_p >= 1.0) & (log_min_p == _NOTHING):
        chosen = tl.where(tl.sum(tl.where(steps == chosen, sizes, 0.0), 0) > ROOM, tl.maximum(chosen - 1, 0), chosen)
    return chosen, tl.sum(tl.where(steps == chosen, sizes, 0.0), 0).to(tl.int32)


@triton.jit
def _lowest(most, chosen, DISTANCES: tl.constexpr):
    return tl.where(chosen == DISTANCES - 1, _NOTHING, most - DISTANCE * (chosen + 1))


@triton.jit
def collect(
    logits, indices, rows, positions, numbers, factors, counts, stats, measures, kept_scores, kept_ids, vocab_size,
    logits_stride, WIDTH: tl.constexpr, ROOM: tl.constexpr, PIECES: tl.constexpr, DISTANCES: tl.constexpr,
):  # fmt: skip
    """kept_scores, kept_ids[row]: the tokens within the distance that suffices, in their order."""
    place, piece, num_pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + place)
    if (tl.load(numbers + row * NUMBERS + 2) & FILTERS) == 0:
        return
    index = tl.load(indices + place)
    position = tl.load(positions + index)
    measures += place * num_pieces * DISTANCES * 2
    chosen, size = _bound(measures, numbers + row * NUMBERS, factors + row * FACTORS, num_pieces,
                          ROOM, PIECES, DISTANCES)  # fmt: skip
    if size > ROOM:
        return
    pieces = tl.arange(0, PIECES)
    before = tl.load(measures + (pieces * DISTANCES + chosen) * 2, mask=pieces < piece, other=0.0)
    most = _highest(stats + place * num_pieces * STATS, pieces, num_pieces)
    tokens = piece * WIDTH + tl.arange(0, WIDTH)
    x = _scores(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
    near = (x >= _lowest(most, chosen, DISTANCES)) & (x > _NOTHING)
    at = place * ROOM + tl.sum(before, 0).to(tl.int32) + tl.cumsum(near.to(tl.int32), 0) - 1
    tl.store(kept_scores + at, x, mask=near)
    tl.store(kept_ids + at, tokens, mask=near)


@triton.jit
def _ordered(x):
    """int32 in the order of float32."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _MOST_BITS)


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
def _nearness(log_probs, entropy):
    """int32 that falls with the distance of the surprise from the entropy."""
    return -(tl.abs(log_probs + entropy).to(tl.int32, bitcast=True))


@triton.jit
def _filtered(x, ids, is_there, most, total, entropy, numbers, factors):
    """x: the candidates' scores. Which of them are kept, the sum of theirs, and the least nearness that is kept."""
    top_k, top_p, log_min_p, typical_p = (
        tl.load(numbers + 1), tl.load(factors + 1), tl.load(factors + 2), tl.load(factors + 3)
    )  # fmt: skip
    ordered, weights = tl.where(is_there, _ordered(x), -2147483648), tl.where(is_there, tl.exp(x - most), 0.0)
    kept = is_there
    if top_k > 0:
        kept = kept & (ordered >= _threshold(ordered, is_there.to(tl.float32), top_k.to(tl.float32)))
        total = tl.sum(tl.where(kept, weights, 0.0), 0)
    if top_p < 1.0:
        kept = kept & (ordered >= _threshold(ordered, tl.where(kept, weights, 0.0), top_p * total))
        total = tl.sum(tl.where(kept, weights, 0.0), 0)
    if log_min_p > _NOTHING:
        kept = kept & (x >= most + log_min_p)
        total = tl.sum(tl.where(kept, weights, 0.0), 0)
    least = tl.full((), -2147483648, tl.int32)
    if typical_p < 1.0:
        log_probs = x - most - tl.log(total)
        probs = tl.where(kept, tl.exp(log_probs), 0.0)
        if (top_k > 0) | (top_p < 1.0) | (log_min_p > _NOTHING):
            entropy = -tl.sum(tl.where(probs > 0, log_probs, 0.0) * probs, 0)
        near = tl.where(kept, _nearness(log_probs, entropy), -2147483648)
        least = _threshold(near, probs, typical_p)
        kept = kept & (near >= least)
        total = tl.sum(tl.where(kept, weights, 0.0), 0)
    return kept, total, least, entropy


@triton.jit
def _over_row(
    logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride,
    most, threshold, log_total, entropy, least, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of the tokens of a whole row whose ordered score reaches `threshold`: their number, sum, and sum of (score -
    maximum) exp(score - maximum); and the probability of those whose nearness reaches `least`.
    """
    size, total, surprise, near = most * 0.0, most * 0.0, most * 0.0, most * 0.0
    for first in range(0, vocab_size, WIDTH):
        tokens = first + tl.arange(0, WIDTH)
        x = _scores(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
        kept = (_ordered(x) >= threshold) & (x > _NOTHING)
        weights = tl.where(kept, tl.exp(x - most), 0.0)
        size += tl.sum(kept.to(tl.float32), 0)
        total += tl.sum(weights, 0)
        surprise += tl.sum(tl.where(weights > 0, x - most, 0.0) * weights, 0)
        is_near = kept & (_nearness(x - most - log_total, entropy) >= least)
        near += tl.sum(tl.where(is_near, tl.exp(x - most - log_total), 0.0), 0)
    return size, total, surprise, near


@triton.jit
def _filter_row(
    logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most, WIDTH: tl.constexpr,
):  # fmt: skip
    """`_filtered` of a whole row, which is read again for every bit of a threshold. Returns thresholds of the ordered
    score and of the nearness, log of the sum and entropy for the latter, and the sum of what is kept.
    """
    own, of = numbers + row * NUMBERS, factors + row * FACTORS
    top_k, top_p, log_min_p, typical_p = tl.load(own + 1), tl.load(of + 1), tl.load(of + 2), tl.load(of + 3)
    lowest = tl.full((), -2147483648, tl.int32)
    threshold, least, entropy, log_total = lowest, lowest, most * 0.0, most * 0.0
    size, total, surprise, near = _over_row(
        logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
        threshold, log_total, entropy, least, WIDTH,
    )  # fmt: skip
    for kind in range(3):  # top_k, top_p, typical_p
        is_used = ((kind == 0) & (top_k > 0)) | ((kind == 1) & (top_p < 1.0)) | ((kind == 2) & (typical_p < 1.0))
        if (kind == 2) & (log_min_p > _NOTHING):
            threshold = tl.maximum(threshold, _ordered(most + log_min_p))
            size, total, surprise, near = _over_row(
                logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
                threshold, log_total, entropy, least, WIDTH,
            )  # fmt: skip
        if is_used:
            if kind == 2:
                log_total = tl.log(total)
                entropy = log_total - tl.div_rn(surprise, total)
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
    return threshold, least, log_total, entropy


@triton.jit
def _draw_from_row(
    logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
    threshold, least, log_total, entropy, IS_TYPICAL, WIDTH: tl.constexpr,
):  # fmt: skip
    """The best value of what is kept, its token, and the sum of what is kept."""
    seed = tl.load(numbers + row * NUMBERS)
    best, token, total = most * 0.0 + _NOTHING, tl.full((), 0, tl.int32), most * 0.0
    for first in range(0, vocab_size, WIDTH):
        tokens = first + tl.arange(0, WIDTH)
        x = _scores(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
        kept = (_ordered(x) >= threshold) & (x > _NOTHING)
        kept = kept & ((_nearness(x - most - log_total, entropy) >= least) | (IS_TYPICAL == 0))
        total += tl.sum(tl.where(kept, tl.exp(x - most), 0.0), 0)
        values = tl.where(kept, x - _log_exponentials(tokens, seed, position), _NOTHING)
        here, its_token = _best(values, tokens)
        token = tl.where(here > best, its_token, token)
        best = tl.maximum(best, here)
    return best, token, total


@triton.jit
def resolve(
    logits, indices, rows, positions, numbers, factors, counts, stats, measures, kept_scores, kept_ids,
    token_ids, bad, overflowed, logprobs, last_tokens, vocab_size, logits_stride, num_pieces,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, PIECES: tl.constexpr, DISTANCES: tl.constexpr, UPDATES: tl.constexpr,
):  # fmt: skip
    """token_ids, bad, overflowed, logprobs[index]: the row's token. With UPDATES its newest token and counts follow."""
    place = tl.program_id(0)
    index, row = tl.load(indices + place), tl.load(rows + place)
    position = tl.load(positions + index)
    own, of = numbers + row * NUMBERS, factors + row * FACTORS
    flags = tl.load(own + 2)
    pieces = tl.arange(0, PIECES)
    is_piece = pieces < num_pieces
    found = stats + (place * num_pieces + pieces) * STATS
    peaks = tl.load(found, mask=is_piece, other=_NOTHING)
    most = tl.max(peaks, 0)
    origin = tl.where(most == _NOTHING, 0.0, most)
    shares = tl.exp(peaks - origin)
    total = tl.sum(shares * tl.load(found + 1, mask=is_piece, other=0.0), 0)
    has_nan = tl.max(tl.load(found + 6, mask=is_piece, other=0.0), 0) > 0
    bests = tl.load(found + 2, mask=is_piece, other=_NOTHING)
    _, token = _best(bests, tl.load(found + 3, mask=is_piece, other=0.0).to(tl.int32))
    is_bad = has_nan | (most == _NOTHING) | (most == float("inf"))
    overflows = most != most
    if ((flags & FILTERS) != 0) & (is_bad == 0):
        measures += place * num_pieces * DISTANCES * 2
        chosen, size = _bound(measures, own, of, num_pieces, ROOM, PIECES, DISTANCES)
        overflows = size > ROOM
        seed = tl.load(own)
        is_alone = (tl.load(own + 1) <= 0) & (tl.load(of + 1) >= 1.0) & (tl.load(of + 2) == _NOTHING)
        if overflows == 0:
            lanes = tl.arange(0, ROOM)
            is_there = lanes < size
            x = tl.load(kept_scores + place * ROOM + lanes, mask=is_there, other=_NOTHING)
            ids = tl.load(kept_ids + place * ROOM + lanes, mask=is_there, other=0)
            log_share = tl.load(found + 7, mask=is_piece, other=0.0)
            sums = tl.load(found + 1, mask=is_piece, other=0.0)
            shift = tl.where(sums > 0, peaks - origin, 0.0)
            surprise = tl.sum(shares * (log_share + sums * shift), 0)
            entropy = tl.log(total) - tl.div_rn(surprise, total)
            everything = total
            kept, total, least, entropy = _filtered(x, ids, is_there, most, total, entropy, own, of)
            # typical_p alone: whether a token outside the buffer could be as near
            edge = _lowest(most, chosen, DISTANCES) - most - tl.log(everything)
            beyond = tl.where(edge + entropy > 0, 0, _nearness(edge, entropy))
            overflows = is_alone & (chosen < DISTANCES - 1) & (beyond >= least)
            values = tl.where(kept, x - _log_exponentials(ids, seed, position), _NOTHING)
            _, token = _best(values, tl.where(kept, ids, _MOST_BITS))
        if overflows:
            threshold, least, log_total, entropy = _filter_row(
                logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most, WIDTH
            )
            threshold = tl.maximum(threshold, _ordered(most + tl.load(of + 2)))
            is_typical = (tl.load(of + 3) < 1.0).to(tl.int32)
            _, token, total = _draw_from_row(
                logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
                threshold, least, log_total, entropy, is_typical, WIDTH,
            )  # fmt: skip
    token = tl.minimum(token, vocab_size - 1)
    tl.store(token_ids + index, token.to(tl.int64))
    tl.store(bad + index, is_bad.to(tl.uint8))
    tl.store(overflowed + index, overflows.to(tl.uint8))
    logprob = tl.full((), float("nan"), tl.float32)
    if (flags & SHOWN) != 0:
        score = tl.max(_scores(logits, row, index, position, token + tl.arange(0, 2) * vocab_size, numbers, factors,
                               counts, vocab_size, logits_stride), 0)  # fmt: skip
        logprob = score - most - tl.log(total)
    if (flags & RAW) != 0:
        raw_peaks = tl.load(found + 4, mask=is_piece, other=_NOTHING)
        raw_most = tl.max(raw_peaks, 0)
        raw_total = tl.sum(tl.exp(raw_peaks - raw_most) * tl.load(found + 5, mask=is_piece, other=0.0), 0)
        logit = tl.load(logits + index * logits_stride + token).to(tl.float32)
        logprob = logit - raw_most - tl.log(raw_total)
    tl.store(logprobs + index, logprob)
    if UPDATES:
        tl.store(last_tokens + row, token.to(tl.int64))
        slot = tl.load(own + 3)
        if slot >= 0:
            at = counts + slot * vocab_size + token
            tl.store(at, tl.load(at) + 1)


class Outputs(NamedTuple):
    """Where results go."""

    # [S] int64 tokens
    token_ids: torch.Tensor
    # [S] uint8: 1 where scores had a NaN or nothing finite
    bad: torch.Tensor
    # [S] uint8: 1 where the buffer was too small
    overflowed: torch.Tensor
    # [S] float32 log probabilities of the tokens, NaN where not wanted
    logprobs: torch.Tensor


def sample_rows(
    logits: torch.Tensor,
    indices: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    parameters: Parameters,
    outputs: Outputs,
    any_filters: bool,
    updates: bool,
    width: int = WIDTH,
    room: int = ROOM,
) -> None:
    """logits: [S, V], not changed. indices, rows: [n] int64, which of the S rows to sample, and their rows of the
    parameters; positions: [S] int64 of their tokens. any_filters: whether one of them may have filters; updates:
    whether the tokens are the newest of their rows.
    """
    num_rows, vocab_size = indices.shape[0], logits.shape[1]
    num_pieces = triton.cdiv(vocab_size, width)
    fixed: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 8}
    shape: dict[str, Any] = {"PIECES": triton.next_power_of_2(num_pieces), "DISTANCES": DISTANCES}
    step = (logits, indices, rows, positions, parameters.numbers, parameters.factors, parameters.counts)
    sizes = (vocab_size, logits.stride(0))
    num_measures = num_rows * num_pieces * DISTANCES * 2 if any_filters else 4  # what follows stays aligned
    num_kept = num_rows * room if any_filters else 4
    floats = torch.empty(
        num_rows * num_pieces * STATS.value + num_measures + num_kept, dtype=torch.float32, device=logits.device
    )
    stats, measures, kept_scores = floats.split([num_rows * num_pieces * STATS.value, num_measures, num_kept])
    kept_ids = torch.empty(num_kept, dtype=torch.int32, device=logits.device)
    grid = (num_rows, num_pieces)
    scan[grid](*step, stats, *sizes, WIDTH=width, **fixed)
    if any_filters:
        measure[grid](*step, stats, measures, *sizes, WIDTH=width, **shape, **fixed)
        collect[grid](*step, stats, measures, kept_scores, kept_ids, *sizes, WIDTH=width, ROOM=room, **shape, **fixed)
    resolve[(num_rows,)](
        *step, stats, measures, kept_scores, kept_ids, *outputs, parameters.last_tokens, *sizes, num_pieces,
        WIDTH=width, ROOM=room, UPDATES=updates, **shape, **fixed,
    )  # fmt: skip
