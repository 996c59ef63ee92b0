"""Prompt lookup against its definition, written out."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lorikeet.shard.speculation.lookup import Lookup

TOKENS = st.integers(0, 3)


def defined(text: Sequence[int], shortest: int, longest: int, num_tokens: int) -> list[int]:
    """The longest suffix that occurred before, its most recent occurrence, and what follows there, repeated."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                period = list(text[end:])
                return [period[i % len(period)] for i in range(num_tokens)]
    return []


@given(st.lists(TOKENS, min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 6), st.integers(0, 59))
def test_the_longest_suffix_most_recently(text: list[int], shortest: int, more: int, cut: int) -> None:
    first = max(1, min(cut, len(text)))
    lookup = Lookup(text[:first], shortest, shortest + more)
    for end in range(first, len(text) + 1):
        assert lookup.propose(5) == defined(text[:end], shortest, shortest + more, 5)
        assert lookup.propose(0) == []
        lookup.extend(text[end : end + 1])


@given(st.lists(TOKENS, min_size=1, max_size=30), st.lists(TOKENS, min_size=1, max_size=30))
def test_another_text_is_searched_but_no_match_crosses_the_border(before: list[int], text: list[int]) -> None:
    lookup = Lookup(text, 1, 4, before)
    drafted = lookup.propose(4)
    own = defined(text, 1, 4, 4)
    in_other = [
        before[end : end + 4]
        for length in range(min(4, len(text)), 0, -1)
        for end in range(len(before), length - 1, -1)
        if before[end - length : end] == text[len(text) - length :]
    ]
    assert drafted == own or drafted in in_other


def test_a_text_without_matches_gives_no_draft() -> None:
    assert Lookup([1, 2, 3]).propose(5) == []
    assert Lookup([3]).propose(5) == []
    assert Lookup([3, 1, 3], shortest=2).propose(5) == []
