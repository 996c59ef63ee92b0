"""Stop strings are found wherever they lie, and nothing that belongs to one is shown too early."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.router.text.stop import StopMatcher


def run(stops: list[str], include: bool, texts: list[str]) -> tuple[list[str], str | None]:
    """What is shown after each text (and at the end), and the stop that was found."""
    matcher = StopMatcher(stops, include)
    shown = []
    for text in texts:
        shown.append(matcher.push(text))
        if matcher.matched is not None:
            return shown, matcher.matched
    return [*shown, matcher.flush()], None


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """The oracle: try every end from the left, and for each every start from the left."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return start, end
    return None


TEXT = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


@given(text=TEXT, stops=STOPS, include=st.booleans(), data=st.data())
@settings(max_examples=500, deadline=None)
def test_where_text_is_cut_makes_no_difference(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
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
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    shown = ""
    for index, char in enumerate(text):
        shown += matcher.push(char)
        if matcher.matched is not None:
            break
        held = text[len(shown) : index + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_inside_one_text_leaves_a_rest() -> None:
    matcher = StopMatcher(["\n\n"], include=True)
    assert matcher.push("}\n\nfoo") == "}\n\n"
    assert matcher.num_beyond == 3


def test_kept_stop_text_is_never_held_back() -> None:
    assert run(["<end>"], True, ["a<e", "nd", ">b"]) == (["a<e", "nd", ">"], "<end>")
    assert run(["<end>"], False, ["a<e", "nd", ">b"]) == (["a", "", ""], "<end>")


def test_held_text_comes_when_nothing_follows() -> None:
    assert run(["<end>"], False, ["a<en"]) == (["a", "<en"], None)
