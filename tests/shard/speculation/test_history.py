"""The index of history drafts against its definition, written out."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lorikeet.shard.speculation.history_index import BLOCK, CONTEXT, LENGTHS, MIN_BYTES, HistoryIndex

PAIR = ("tenant", "digest")
OUTPUTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5)


def defined(outputs: Sequence[list[int]], text: list[int], num_tokens: int) -> tuple[list[int], int]:
    """The longest suffix whose newest occurrence in an output has something after it, and what follows there."""
    for length in reversed(LENGTHS):
        suffix = text[len(text) - length :] if length <= len(text) else None
        found = newest(outputs, suffix) if suffix else None
        if found:
            return found[:num_tokens], length
    return [], 0


def newest(outputs: Sequence[list[int]], suffix: list[int]) -> list[int] | None:
    """What follows the newest occurrence; None without one."""
    for output in reversed(outputs):
        for end in range(len(output), len(suffix) - 1, -1):
            if output[end - len(suffix) : end] == suffix:
                return output[end:]
    return None


def filled(outputs: Sequence[list[int]]) -> HistoryIndex:
    history = HistoryIndex(64 << 20)  # little of it is written: a collision is improbable
    for output in outputs:
        history.add(PAIR, output)
    return history


def test_the_longest_suffix_in_the_newest_output() -> None:
    """Fixed cases: an entry may be lost in a collision, but these have none."""
    numbers = random.Random(1)
    for _ in range(60):
        outputs = [[numbers.randrange(3) for _ in range(numbers.randrange(1, 40))] for _ in range(4)]
        history = filled(outputs)
        for output in outputs:
            for end in range(1, len(output) + 1):
                text = [9, *output[max(0, end - 30) : end]]
                assert history.propose(PAIR, text, 5) == defined(outputs, text, 5)


@given(OUTPUTS, st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_a_draft_follows_its_match_in_an_output(outputs: list[list[int]], text: list[int]) -> None:
    draft_ids, length = filled(outputs).propose(PAIR, text, 6)
    if draft_ids:
        assert length in LENGTHS and len(draft_ids) <= 6
        followed = newest(outputs, text[len(text) - length :])
        assert followed is not None and followed[:6] == draft_ids


def test_pairs_do_not_see_each_other() -> None:
    history, output = HistoryIndex(MIN_BYTES), list(range(100, 140))
    history.add(("one", "a"), output)
    for pair in (("two", "a"), ("one", "b"), ("", "")):
        assert history.propose(pair, output[:10], 4) == ([], 0)
        history.add(pair, [1, 2, 3])
        assert history.propose(pair, output[:10], 4) == ([], 0)
    assert history.propose(("one", "a"), output[:10], 4) == ([110, 111, 112, 113], 8)


def test_an_output_longer_than_a_block_is_found_everywhere() -> None:
    output = [1000 + at for at in range(3 * BLOCK)]
    history = filled([output])
    step = BLOCK - 1 - CONTEXT
    for end in range(LENGTHS[0], len(output) - 1, 7):
        draft_ids, _ = history.propose(PAIR, output[:end], 3)
        assert draft_ids == output[end : end + len(draft_ids)]
        assert draft_ids or end % step == 0, end


def test_a_draft_stops_at_the_end_of_its_output() -> None:
    history = filled([[1, 2, 3, 4, 5], [6, 7, 8]])
    assert history.propose(PAIR, [2, 3, 4], 9) == ([5], 3)
    assert history.propose(PAIR, [4, 5], 9) == ([], 0)
    assert history.propose(PAIR, [5, 6], 9) == ([], 0)


def test_the_pair_that_was_not_used_for_longest_goes_first() -> None:
    history = HistoryIndex(MIN_BYTES)
    num_pairs = history.num_bytes // (4 * (1 + 2 * len(LENGTHS)) * BLOCK)
    output = list(range(BLOCK // 2))
    for pair in range(num_pairs):
        history.add((str(pair), ""), output)
    assert len(history) == num_pairs
    assert history.propose(("0", ""), output[:30], 1)[0]
    history.add(("new", ""), output)
    kept = {pair for pair in range(num_pairs) if history.propose((str(pair), ""), output[:30], 1)[0]}
    assert kept == set(range(num_pairs)) - {1}
    assert history.propose(("new", ""), output[:30], 1)[0]


def test_a_pair_that_has_all_memory_forgets_its_oldest_outputs() -> None:
    history = HistoryIndex(MIN_BYTES)
    num_bytes, num_outputs = history.num_bytes, 4 * MIN_BYTES // BLOCK // 64
    outputs = [[1_000_000 + number * BLOCK + at for at in range(BLOCK // 2)] for number in range(num_outputs)]
    for output in outputs:
        history.add(PAIR, output)
    assert history.num_bytes == num_bytes <= MIN_BYTES + (64 << 10)
    found = [bool(history.propose(PAIR, output[:100], 1)[0]) for output in outputs]
    assert not found[0] and all(found[-8:])


def test_ids_of_large_vocabularies_are_kept() -> None:
    output = [2**31 + at for at in range(20)]
    assert filled([output]).propose(PAIR, output[:5], 2)[0] == output[5:7]
