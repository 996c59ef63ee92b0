"""Prompt lookup on CUDA: one launch extends the texts of a step's rows and makes their next drafts.

device_drafts.py has the specification. A program has one row: it counts the accepted drafts, appends the emitted tokens
to the row's text, finds the longest suffix that occurred before, the last occurrence first, and copies what followed
it; and it copies the tokens of the heads at the last emitted token. Integers only: nothing depends on the order of
operations.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' source, annotations included)

import triton
import triton.language as tl

from lorikeet.shard.speculation.device.device_drafts import MOST_DRAFTS, Emitted, Texts

WIDTH = 1024
"""Tokens of a text that are compared at once."""
_NO_TOKEN = tl.constexpr(-1)


@triton.jit(do_not_specialize=["text_width", "max_rows"])
def draft(
    texts, lengths, draft_ids, last_tokens, accepted, table, token_ids, bad, head_ids, report, text_width, max_rows,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, DRAFTS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """LANES: a power of two above DRAFTS, the most drafts of a row."""
    place, num_rows = tl.program_id(0), tl.num_programs(0)
    row, first = tl.load(table + place), tl.load(table + num_rows + place)
    width, source = tl.load(table + 2 * num_rows + place), tl.load(table + 3 * num_rows + place)
    text, before = texts + row * text_width, tl.load(lengths + row)
    lanes = tl.arange(0, LANES)
    is_drafted = lanes < width
    drafted = tl.load(draft_ids + (source * max_rows + row) * DRAFTS + lanes, mask=is_drafted, other=_NO_TOKEN)
    sampled = tl.load(token_ids + first + lanes, mask=is_drafted, other=_NO_TOKEN)
    is_bad = tl.load(bad + first + 1 + lanes, mask=is_drafted, other=1)
    # the first lane that has no accepted draft
    num_accepted = tl.min(tl.where(is_drafted & (drafted == sampled) & (is_bad == 0), LANES, lanes), 0)
    of_report = report + place * (DRAFTS + 1)
    tl.store(of_report + lanes, drafted, mask=lanes < DRAFTS)
    tl.store(accepted + row, num_accepted.to(tl.int64))
    emitted = tl.load(token_ids + first + lanes, mask=lanes <= num_accepted, other=0)
    fits = (lanes <= num_accepted) & (before + lanes < text_width)
    tl.store(text + before + lanes, emitted.to(tl.int32), mask=fits)
    length = tl.minimum(before + num_accepted + 1, text_width)
    tl.debug_barrier()  # all threads have read the length and written the tokens
    tl.store(lengths + row, length)
    tl.store(last_tokens + row, tl.load(token_ids + first + num_accepted))

    best = tl.zeros((WIDTH,), tl.int64)
    for begin in range(0, length - 1, WIDTH):
        ends = begin + tl.arange(0, WIDTH)  # the match's last token
        is_match = ends < length - 1
        size = tl.zeros((WIDTH,), tl.int64)
        for back in tl.static_range(LONGEST):
            newest = tl.load(text + length - 1 - back, mask=back < length, other=-2)
            token = tl.load(text + ends - back, mask=is_match & (ends >= back), other=-1)
            is_match = is_match & (ends >= back) & (token == newest)
            size += is_match.to(tl.int64)
        best = tl.maximum(best, tl.where(size >= SHORTEST, (size << 32) + ends + 1, 0))
    longest = tl.max(best, 0)
    tl.store(of_report + DRAFTS, longest >> 32)
    follows = longest & 0xFFFFFFFF
    is_found = lanes < tl.where(follows > 0, DRAFTS, 0)
    # a match that reaches the newest token is repeated
    at = follows + lanes % tl.maximum(length - follows, 1)
    found = tl.load(text + at, mask=is_found, other=0).to(tl.int64)
    mine = draft_ids + row * DRAFTS + lanes
    tl.store(mine, tl.where(is_found, found, _NO_TOKEN), mask=lanes < DRAFTS)

    num_heads = tl.load(table + 5 * num_rows + place)
    has_head = (lanes < num_heads) & (lanes < DRAFTS)
    at = tl.load(table + 4 * num_rows + place) + num_accepted * num_heads + lanes
    of_heads = tl.load(head_ids + at, mask=has_head, other=0)
    tl.store(mine + max_rows * DRAFTS, tl.where(has_head, of_heads, _NO_TOKEN), mask=lanes < DRAFTS)


def propose(texts: Texts, emitted: Emitted, ngrams: range) -> None:
    """Propose drafts as `device_drafts.propose` does."""
    max_rows, text_width = texts.token_ids.shape
    draft[(emitted.table.shape[1],)](
        *texts, *emitted, text_width, max_rows, SHORTEST=ngrams[0], LONGEST=ngrams[-1], DRAFTS=MOST_DRAFTS,
        LANES=triton.next_power_of_2(MOST_DRAFTS + 1), WIDTH=WIDTH, num_warps=4,
    )  # fmt: skip
