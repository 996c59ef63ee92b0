"""Stop strings are found at any position, and no part of one is shown too early."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.router.errors import ValidationError
from lorikeet.router.text.stop import StopMatcher, check_stops


def run(stops: list[str], include: bool, texts: list[str]) -> tuple[list[str], str | None]:
    """The text shown after each push (and at the end), and the stop string that was found."""
    matcher = StopMatcher(stops, include)
    shown = []
    for text in texts:
        shown.append(matcher.push(text))
        if matcher.matched is not None:
            return shown, matcher.matched
    return [*shown, matcher.flush()], None


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """The oracle: tries every end from the left, and for each end every start from the left."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return start, end
    return None


TEXT = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


@given(text=TEXT, stops=STOPS, include=st.booleans(), data=st.data())
@settings(max_examples=500, deadline=None)
def test_chunks_make_no_difference(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    texts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, matched = run(stops, include, texts)
    expected = first_match(text, stops)
    if expected is None:
        assert matched is None
        assert "".join(shown) == text
    else:
        start, end = expected
        assert matched == text[start:end]
        assert "".join(shown) == text[: end if include else start]


@given(text=TEXT, stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_only_possible_stops_are_withheld(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    shown = ""
    for index, char in enumerate(text):
        shown += matcher.push(char)
        if matcher.matched is not None:
            break
        held = text[len(shown) : index + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(text=TEXT, stops=STOPS, include=st.booleans(), data=st.data())
@settings(max_examples=500, deadline=None)
def test_no_match_ends_in_the_text_before_the_minimum(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    """The oracle is vLLM's rule: the first match whose end lies in text that may end the output."""
    num_early = data.draw(st.integers(0, len(text)))
    matcher = StopMatcher(stops, include)
    shown = "".join(matcher.push(char, may_end=False) for char in text[:num_early])
    for char in text[num_early:]:
        shown += matcher.push(char)
        if matcher.matched is not None:
            break
    shown += "" if matcher.matched is not None else matcher.flush()
    late = range(num_early + 1, len(text) + 1)
    ends = [(end, start) for end in late for start in range(end) if text[start:end] in stops]
    end, start = min(ends, default=(len(text), len(text)))
    assert matcher.matched == (text[start:end] if ends else None)
    # What was shown before the minimum stays shown, even where a stop string begins in it.
    cut = end if include or not ends else start
    assert shown == text[:cut]


def test_a_stop_inside_a_text_leaves_a_rest() -> None:
    matcher = StopMatcher(["\n\n"], include=True)
    assert matcher.push("}\n\nfoo") == "}\n\n"
    assert matcher.num_beyond == 3


def test_included_stop_strings_are_never_withheld() -> None:
    assert run(["<end>"], True, ["a<e", "nd", ">b"]) == (["a<e", "nd", ">"], "<end>")
    assert run(["<end>"], False, ["a<e", "nd", ">b"]) == (["a", "", ""], "<end>")


def test_withheld_text_is_flushed() -> None:
    assert run(["<end>"], False, ["a<en"]) == (["a", "<en"], None)


def test_long_stop_strings_cost_as_little_as_short_ones() -> None:
    stops = ["a" * 1023 + end for end in "bcdefgh"]
    matcher = StopMatcher(stops, include=False)
    started = time.process_time()
    for _ in range(2000):
        matcher.push("aaaa")
    assert time.process_time() - started < 2
    assert matcher.flush() == "a" * 1023


def test_bounds() -> None:
    check_stops(["é" * 512] * 8, 8)
    for stops in (["x"] * 9, ["é" * 513], ["x" * 1025], ["x" * 1000] * 8 + ["y" * 200]):
        with pytest.raises(ValidationError, match="stop sequence"):
            check_stops(stops, 8 if len(stops) == 9 and stops[0] == "x" else 64)
