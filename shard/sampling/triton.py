"""Sampling on CUDA: tokens of many rows by a few launches, none of which writes a value for every token it may sample.

`scan` reads each row once: maximum, sum and, of rows without filters, the arg max with noise. Of rows with filters
`measure` counts the tokens in steps below the maximum, `collect` puts those of as many steps as fit into a buffer, and
`resolve` applies the filters to the buffer. Where the buffer is too small, `resolve_rest` reads the whole row a few
times, and the result says so. filters.py, penalties.py, masks.py and noise.py are the specification.
Bits: a row's sums have an order that depends on the vocabulary alone, so its token is the same in any batch.
A captured step launches them for all rows whose logits it computes. A row that it does not sample has no row of the
parameters: its programs return at once, and `scan` copies its logits for what follows the graph.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lorikeet.shard.sampling.filters_triton import (
    draw_from_row,
    filter_row,
    filtered,
    holds_first_filter,
    last_step,
    lowest_near,
    nearness,
    steps_below,
)  # fmt: skip
from lorikeet.shard.sampling.scores_triton import (
    FACTORS,
    FILTERS,
    MOST_BITS,
    NOTHING,
    NUMBERS,
    RAW,
    SAMPLES,
    SHOWN,
    STATS,
    best_of,
    counts_of,
    log_exponentials,
    scores_of,
)  # fmt: skip
from lorikeet.shard.system import gpu
from lorikeet.shard.system.operators import operator

WIDTH = 4096
"""Tokens of a program."""
ROOM = 4096
"""Tokens of a row to which filters are applied without reading the row again."""
RESOLVE_REGISTERS = 192
"""Registers of a thread of `resolve`, at most: none is spilt."""


def most_registers(capability: tuple[int, int]) -> int:
    """The registers of a thread of the programs that read rows. 64 let four programs run on a multiprocessor, but for
    some devices too many are spilt then.
    """
    return 128 if capability >= (12, 0) else 96 if capability >= (10, 0) else 64


def rest_pieces(capability: tuple[int, int]) -> int:
    """Pieces of WIDTH tokens that `resolve_rest` reads at once."""
    return 1 if capability >= (12, 0) else 2


STEPS = 64
"""Steps below the maximum in which tokens are counted for the buffer."""


class Parameters(NamedTuple):
    """What the device knows of each row."""

    # [max_rows, NUMBERS] int64: seed, top_k (0: off), flags, row of the counts (-1: none), address of [V] bool of the
    # allowed tokens (0: all), address and number of its changes
    numbers: torch.Tensor
    # [max_rows, FACTORS] float32: temperature, top_p (1: off), log min_p (-inf: off), typical_p (1: off), repetition,
    # frequency and presence penalties
    factors: torch.Tensor
    # [1] int64 address of the counts, [slots, V] int32
    counts: torch.Tensor
    # [max_rows] int64 newest token of each row
    last_tokens: torch.Tensor


@triton.jit
def scan(
    logits, indices, rows, positions, numbers, factors, counts, stats, kept_logits, vocab_size, logits_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """stats[row, program]: maximum, sum of exp(score - maximum), best value and its token, the same maximum and sum of
    the logits, whether there is a NaN, sum of (score - maximum) exp(score - maximum); sums that the row does not need
    are arbitrary. kept_logits[index]: the logits of
    rows that are not sampled.
    """
    place, piece = tl.program_id(0), tl.program_id(1)
    index, row = tl.load(indices + place), tl.load(rows + place)
    tokens = piece * WIDTH + tl.arange(0, WIDTH)
    if row < 0:
        if kept_logits is not None:
            given = tl.load(logits + index * logits_stride + tokens, mask=tokens < vocab_size)
            tl.store(kept_logits + index * vocab_size + tokens, given.to(tl.float32), mask=tokens < vocab_size)
        return
    position = tl.load(positions + index)
    x = scores_of(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
    flags = tl.load(numbers + row * NUMBERS + 2)
    most = tl.max(x, 0)
    total, spread = most, most
    if (flags & (SHOWN | FILTERS)) != 0:
        distances = x - tl.where(most == NOTHING, 0.0, most)
        weights = tl.exp(distances)
        total = tl.sum(weights, 0)
        spread = tl.sum(tl.where(weights > 0, distances, 0.0) * weights, 0)
    values = x
    if (flags & (SAMPLES | FILTERS)) == SAMPLES:
        values = x - log_exponentials(tokens, tl.load(numbers + row * NUMBERS), position)
    best, token = best_of(values, tokens)
    raw_most, raw_total = most, most
    if (flags & RAW) != 0:
        raw = tl.load(logits + index * logits_stride + tokens, mask=tokens < vocab_size, other=NOTHING).to(tl.float32)
        raw_most = tl.max(raw, 0)
        raw_total = tl.sum(tl.exp(raw - tl.where(raw_most == NOTHING, 0.0, raw_most)), 0)
    place = stats + (place * tl.num_programs(1) + piece) * STATS
    tl.store(place, most)
    tl.store(place + 1, total)
    tl.store(place + 2, best)
    tl.store(place + 3, token.to(tl.float32))
    tl.store(place + 4, raw_most)
    tl.store(place + 5, raw_total)
    tl.store(place + 6, tl.max((x != x).to(tl.float32), 0))
    tl.store(place + 7, spread)


@triton.jit
def highest(stats, pieces, num_pieces):
    """The maximum over all pieces of a row."""
    return tl.max(tl.load(stats + pieces * STATS, mask=pieces < num_pieces, other=NOTHING), 0)


@triton.jit
def measure(
    logits, indices, rows, positions, numbers, factors, counts, stats, sizes, vocab_size, logits_stride,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """sizes[row, program, step]: number of tokens in each step below the row's maximum."""
    place, piece, num_pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + place)
    if row < 0:
        return
    if (tl.load(numbers + row * NUMBERS + 2) & FILTERS) == 0:
        return
    index = tl.load(indices + place)
    position = tl.load(positions + index)
    most = highest(stats + place * num_pieces * STATS, tl.arange(0, PIECES), num_pieces)
    tokens = piece * WIDTH + tl.arange(0, WIDTH)
    x = scores_of(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
    found = tl.histogram(steps_below(most, x, STEPS), STEPS, mask=x > NOTHING)
    tl.store(sizes + (place * num_pieces + piece) * STEPS + tl.arange(0, STEPS), found)


@triton.jit
def collect(
    logits, indices, rows, positions, numbers, factors, counts, stats, sizes, kept_scores, kept_ids, vocab_size,
    logits_stride, WIDTH: tl.constexpr, ROOM: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """kept_scores, kept_ids[row]: the tokens of as many steps as fit into the buffer, in their order."""
    place, piece, num_pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + place)
    if row < 0:
        return
    if (tl.load(numbers + row * NUMBERS + 2) & FILTERS) == 0:
        return
    index = tl.load(indices + place)
    position = tl.load(positions + index)
    sizes += place * num_pieces * STEPS
    last, _size = last_step(sizes, num_pieces, ROOM, PIECES, STEPS)
    pieces, steps = tl.arange(0, PIECES), tl.arange(0, STEPS)
    mask = (pieces < piece)[:, None] & (steps <= last)[None, :]
    before = tl.sum(tl.sum(tl.load(sizes + pieces[:, None] * STEPS + steps[None, :], mask=mask, other=0), 1), 0)
    most = highest(stats + place * num_pieces * STATS, pieces, num_pieces)
    tokens = piece * WIDTH + tl.arange(0, WIDTH)
    x = scores_of(logits, row, index, position, tokens, numbers, factors, counts, vocab_size, logits_stride)
    near = (steps_below(most, x, STEPS) <= last) & (x > NOTHING)
    at = place * ROOM + before + tl.cumsum(near.to(tl.int32), 0) - 1
    tl.store(kept_scores + at, x, mask=near)
    tl.store(kept_ids + at, tokens, mask=near)


@triton.jit
def _emit(
    logits, index, row, position, numbers, factors, counts, stats, token_ids, logprobs, last_tokens, vocab_size,
    logits_stride, token, most, total, pieces, is_piece, UPDATES: tl.constexpr,
):  # fmt: skip
    """Store the row's token and its log probability. With UPDATES its newest token and counts follow.

    stats: of the row, [pieces, STATS]; total: sum of exp(score - most) of what it is sampled from.
    """
    own = numbers + row * NUMBERS
    flags = tl.load(own + 2)
    token = tl.minimum(token, vocab_size - 1)
    tl.store(token_ids + index, token.to(tl.int64))
    logprob = tl.full((), float("nan"), tl.float32)
    if (flags & SHOWN) != 0:
        score = tl.max(scores_of(logits, row, index, position, token + tl.arange(0, 2) * vocab_size, numbers, factors,
                               counts, vocab_size, logits_stride), 0)  # fmt: skip
        logprob = score - most - tl.log(total)
    if (flags & RAW) != 0:
        raw_peaks = tl.load(stats + pieces * STATS + 4, mask=is_piece, other=NOTHING)
        raw_most = tl.max(raw_peaks, 0)
        raw_sums = tl.load(stats + pieces * STATS + 5, mask=is_piece, other=0.0)
        raw_total = tl.sum(tl.exp(raw_peaks - raw_most) * raw_sums, 0)
        logit = tl.load(logits + index * logits_stride + token).to(tl.float32)
        logprob = logit - raw_most - tl.log(raw_total)
    tl.store(logprobs + index, logprob)
    if UPDATES:
        tl.store(last_tokens + row, token.to(tl.int64))
        slot = tl.load(own + 3)
        if slot >= 0:
            at = counts_of(counts, slot, vocab_size) + token
            tl.store(at, tl.load(at) + 1)


@triton.jit
def resolve(
    logits, indices, rows, positions, numbers, factors, counts, stats, sizes, kept_scores, kept_ids,
    token_ids, bad, overflowed, logprobs, last_tokens, vocab_size, logits_stride, num_pieces,
    ROOM: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr, UPDATES: tl.constexpr,
):  # fmt: skip
    """token_ids, bad, overflowed, logprobs[index]: the row's token, unless its buffer was too small."""
    place = tl.program_id(0)
    index, row = tl.load(indices + place), tl.load(rows + place)
    if row < 0:
        return
    position = tl.load(positions + index)
    own, of = numbers + row * NUMBERS, factors + row * FACTORS
    flags = tl.load(own + 2)
    pieces = tl.arange(0, PIECES)
    is_piece = pieces < num_pieces
    stats += place * num_pieces * STATS
    found = stats + pieces * STATS
    peaks = tl.load(found, mask=is_piece, other=NOTHING)
    most = tl.max(peaks, 0)
    origin = tl.where(most == NOTHING, 0.0, most)
    shares = tl.exp(peaks - origin)
    sums = tl.load(found + 1, mask=is_piece, other=0.0)
    total = tl.sum(shares * sums, 0)
    has_nan = tl.max(tl.load(found + 6, mask=is_piece, other=0.0), 0) > 0
    bests = tl.load(found + 2, mask=is_piece, other=NOTHING)
    _, token = best_of(bests, tl.load(found + 3, mask=is_piece, other=0.0).to(tl.int32))
    is_bad = has_nan | (most == NOTHING) | (most == float("inf"))
    overflows = most != most
    if ((flags & FILTERS) != 0) & (is_bad == 0):
        last, size = last_step(sizes + place * num_pieces * STEPS, num_pieces, ROOM, PIECES, STEPS)
        lanes = tl.arange(0, ROOM)
        is_there = lanes < size
        x = tl.load(kept_scores + place * ROOM + lanes, mask=is_there, other=NOTHING)
        ids = tl.load(kept_ids + place * ROOM + lanes, mask=is_there, other=0)
        mass = tl.sum(tl.where(is_there, tl.exp(x - most), 0.0), 0)
        overflows = holds_first_filter(last, size, mass, total, own, of, STEPS) == 0
        is_alone = (tl.load(own + 1) <= 0) & (tl.load(of + 1) >= 1.0) & (tl.load(of + 2) == NOTHING)
        shift = tl.where(sums > 0, peaks - origin, 0.0)
        surprise = tl.sum(shares * (tl.load(found + 7, mask=is_piece, other=0.0) + sums * shift), 0)
        entropy = tl.log(total) - tl.div_rn(surprise, total)
        everything = total
        kept, total, least, entropy = filtered(x, ids, is_there, most, total, entropy, own, of)
        # typical_p alone: whether a token outside the buffer could be as near
        edge = lowest_near(most, last, STEPS) - most - tl.log(everything)
        beyond = tl.where(edge + entropy > 0, 0, nearness(edge, entropy))
        overflows = overflows | (is_alone & (last < STEPS - 1) & (beyond >= least))
        values = tl.where(kept, x - log_exponentials(ids, tl.load(own), position), NOTHING)
        _, token = best_of(values, tl.where(kept, ids, MOST_BITS))
    tl.store(bad + index, is_bad.to(tl.uint8))
    tl.store(overflowed + index, overflows.to(tl.uint8))
    if overflows == 0:
        _emit(
            logits, index, row, position, numbers, factors, counts, stats, token_ids, logprobs, last_tokens,
            vocab_size, logits_stride, token, most, total, pieces, is_piece, UPDATES,
        )  # fmt: skip


@triton.jit
def resolve_rest(
    logits, indices, rows, positions, numbers, factors, counts, stats, token_ids, overflowed, logprobs, last_tokens,
    vocab_size, logits_stride, num_pieces, WIDTH: tl.constexpr, PIECES: tl.constexpr, UPDATES: tl.constexpr,
):  # fmt: skip
    """The tokens of rows whose buffer was too small, by passes over the whole row.

    The best of all tokens is the row's token if the last filter keeps it: if those before it in the filter's order do
    not reach the wanted mass. If it does not, neither does it keep any after it; the best of those before it is next.
    """
    place = tl.program_id(0)
    index, row = tl.load(indices + place), tl.load(rows + place)
    if row < 0:
        return
    if tl.load(overflowed + index) == 0:
        return
    position = tl.load(positions + index)
    pieces = tl.arange(0, PIECES)
    is_piece = pieces < num_pieces
    stats += place * num_pieces * STATS
    most = highest(stats, pieces, num_pieces)
    threshold, least, log_total, entropy, wanted = filter_row(
        logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most, WIDTH
    )
    is_typical = (tl.load(factors + row * FACTORS + 3) < 1.0).to(tl.int32)
    token, pivot = tl.full((), 0, tl.int32), tl.full((), -2147483648, tl.int32)
    total, mass = most * 0.0, most * 0.0 + float("inf")
    is_first = 1
    while (is_first != 0) | ((mass >= wanted) & (mass > 0)):
        other, its_pivot, mass = draw_from_row(
            logits, row, index, position, numbers, factors, counts, vocab_size, logits_stride, most,
            threshold, least, log_total, entropy, pivot, is_typical, WIDTH,
        )  # fmt: skip
        if (is_first != 0) | (mass >= wanted):
            token, pivot = other, its_pivot
        if is_first != 0:
            total = mass
            mass = tl.where(wanted == float("inf"), most * 0.0, wanted)  # whether it is kept, takes another pass
        is_first = 0
    _emit(
        logits, index, row, position, numbers, factors, counts, stats, token_ids, logprobs, last_tokens, vocab_size,
        logits_stride, token, most, total, pieces, is_piece, UPDATES,
    )  # fmt: skip


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


@operator("sample_rows", mutates_args=("last_tokens", "token_ids", "bad", "overflowed", "logprobs", "kept_logits"))
def sample_rows(
    logits: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor,
    factors: torch.Tensor, counts: torch.Tensor, last_tokens: torch.Tensor, token_ids: torch.Tensor, bad: torch.Tensor,
    overflowed: torch.Tensor, logprobs: torch.Tensor, kept_logits: torch.Tensor | None, any_filters: bool,
    updates: bool, width: int = WIDTH, room: int = ROOM,
) -> None:  # fmt: skip
    """logits: [L, V], not changed. indices, rows: [n] int64, which of the L rows to sample, and their rows of the
    parameters, -1 for none: the row's logits are copied to kept_logits, [L, V] float32, if there are such.
    positions: [S ≤ L] int64 of the tokens, read of rows that are sampled. What follows is in Parameters and Outputs.
    any_filters: whether a row may have filters; updates: whether the tokens are the newest of their rows.
    """
    num_rows, vocab_size = indices.shape[0], logits.shape[1]
    num_pieces = triton.cdiv(vocab_size, width)
    fixed: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 8}
    pieces: dict[str, Any] = {"PIECES": triton.next_power_of_2(num_pieces)}
    step = (logits, indices, rows, positions, numbers, factors, counts)
    shape = (vocab_size, logits.stride(0))
    num_stats, num_kept = num_rows * num_pieces * STATS.value, num_rows * room if any_filters else 4
    stats, kept_scores = torch.empty(num_stats + num_kept, dtype=torch.float32, device=logits.device).split(
        [num_stats, num_kept]
    )
    num_sizes = num_rows * num_pieces * STEPS if any_filters else 4  # what follows stays aligned
    sizes, kept_ids = torch.empty(num_sizes + num_kept, dtype=torch.int32, device=logits.device).split(
        [num_sizes, num_kept]
    )
    capability = gpu.capability(logits.device)
    grid, wide = (num_rows, num_pieces), {**fixed, "maxnreg": most_registers(capability)}
    scan[grid](*step, stats, kept_logits, *shape, WIDTH=width, **wide)
    if any_filters:
        measure[grid](*step, stats, sizes, *shape, WIDTH=width, STEPS=STEPS, **pieces, **wide)
        collect[grid](
            *step, stats, sizes, kept_scores, kept_ids, *shape, WIDTH=width, ROOM=room, STEPS=STEPS, **pieces, **wide
        )  # fmt: skip
    resolve[(num_rows,)](
        *step, stats, sizes, kept_scores, kept_ids, token_ids, bad, overflowed, logprobs, last_tokens, *shape,
        num_pieces, ROOM=room, STEPS=STEPS, UPDATES=updates, maxnreg=RESOLVE_REGISTERS, **pieces, **fixed,
    )  # fmt: skip
    if any_filters:
        resolve_rest[(num_rows,)](
            *step, stats, token_ids, overflowed, logprobs, last_tokens, *shape, num_pieces,
            WIDTH=rest_pieces(capability) * width, UPDATES=updates, **pieces, **{**fixed, "num_warps": 16},
        )  # fmt: skip


@sample_rows.register_fake
def _(*_args: object) -> None:
    return None
