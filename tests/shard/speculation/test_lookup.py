"""Prompt lookup against its definition, written out."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.proto.params import FIRST_VIRTUAL_ID
from lorikeet.shard.speculation.lookup import FIRST_CAPACITY, CompiledLookup, Lookup
from lorikeet.shard.speculation.lookup_rows import LookupRows

TOKENS = st.integers(0, 3)
Kind = type[Lookup] | type[CompiledLookup]
both = pytest.mark.parametrize("kind", [Lookup, CompiledLookup])


def defined(text: Sequence[int], shortest: int, longest: int, num_tokens: int) -> list[int]:
    """The longest suffix that occurred before, its most recent occurrence, and what follows there, repeated."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                period = list(text[end:])
                return [period[i % len(period)] for i in range(num_tokens)]
    return []


@both
@given(
    text=st.lists(TOKENS, min_size=1, max_size=60),
    shortest=st.integers(1, 3),
    more=st.integers(0, 6),
    cut=st.integers(0, 59),
)
def test_the_longest_suffix_most_recently(kind: Kind, text: list[int], shortest: int, more: int, cut: int) -> None:
    first = max(1, min(cut, len(text)))
    lookup = kind(text[:first], shortest, shortest + more)
    for end in range(first, len(text) + 1):
        assert lookup.propose(5) == defined(text[:end], shortest, shortest + more, 5)
        assert lookup.propose(0) == []
        lookup.extend(text[end : end + 1])


@both
@given(before=st.lists(TOKENS, min_size=1, max_size=30), text=st.lists(TOKENS, min_size=1, max_size=30))
def test_another_text_is_searched_but_no_match_crosses_the_border(
    kind: Kind, before: list[int], text: list[int]
) -> None:
    lookup = kind(text, 1, 4, before)
    drafted = lookup.propose(4)
    own = defined(text, 1, 4, 4)
    in_other = [
        before[end : end + 4]
        for length in range(min(4, len(text)), 0, -1)
        for end in range(len(before), length - 1, -1)
        if before[end - length : end] == text[len(text) - length :]
    ]
    assert drafted == own or drafted in in_other


@both
def test_a_text_without_matches_gives_no_draft(kind: Kind) -> None:
    assert kind([1, 2, 3]).propose(5) == []
    assert kind([3]).propose(5) == []
    assert kind([3, 1, 3], shortest=2).propose(5) == []


@given(
    seed=st.integers(0, 1 << 32),
    num_words=st.integers(1, 400),
    num_before=st.integers(0, 2 * FIRST_CAPACITY),
    lengths=st.tuples(st.integers(1, 4), st.integers(0, 8)),
)
@settings(max_examples=40, deadline=None)
def test_the_compiled_index_is_that_in_python(
    seed: int, num_words: int, num_before: int, lengths: tuple[int, int]
) -> None:
    """While it grows, by any numbers of tokens, with ids up to those of virtual tokens."""
    drawn, (shortest, more) = random.Random(seed), lengths
    words = [drawn.choice((drawn.randrange(200_000), FIRST_VIRTUAL_ID + drawn.randrange(4))) for _ in range(num_words)]
    text = [drawn.choice(words) for _ in range(5 * FIRST_CAPACITY)]
    before, first = [drawn.choice(words) for _ in range(num_before)], drawn.randrange(1, len(text))
    indices = [kind(text[:first], shortest, shortest + more, before) for kind in (Lookup, CompiledLookup)]
    while first < len(text):
        count = drawn.randrange(5)
        for index in indices:
            index.extend(text[first : first + count])
        first += count
        num_tokens = drawn.randrange(9)
        expected, found = ((index.match_length, index.propose(num_tokens)) for index in indices)
        assert expected == found


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
def test_texts_of_many_rows_propose_what_each_does_alone(seed: int) -> None:
    """Some of them are extended, by any numbers of tokens, compiled or not."""
    drawn = random.Random(seed)
    choice: tuple[Kind, ...] = (CompiledLookup, Lookup) if seed % 2 else (CompiledLookup,)
    kinds = [drawn.choice(choice) for _ in range(5)]
    known = [[drawn.randrange(12) for _ in range(drawn.randrange(1, 2 * FIRST_CAPACITY))] for _ in kinds]
    rows, alone = LookupRows(8), [kind(text) for kind, text in zip(kinds, known, strict=True)]
    for row, (kind, text) in enumerate(zip(kinds, known, strict=True)):
        rows.put(row + 2, kind(text))
    for _ in range(100):
        some = sorted(drawn.sample(range(5), drawn.randrange(1, 6)))
        news = [[drawn.randrange(12) for _ in range(drawn.randrange(6))] for _ in some]
        most = [drawn.randrange(9) for _ in some]
        columns = ([row + 2 for row in some], list(map(len, news)), [token for new in news for token in new], most)
        found = rows.follow(*(np.array(column, np.int64) for column in columns))
        for at, (row, new) in enumerate(zip(some, news, strict=True)):
            alone[row].extend(new)
            assert found.draft_ids[at, : found.widths[at]].tolist() == alone[row].propose(most[at])
            assert found.match_lengths[at] == alone[row].match_length
