"""The syntax of names of models and adapters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.adapters import refs
from lorikeet.adapters.refs import HUB_PREFIX, Ref, SourceKind, is_plain, parse


@pytest.mark.parametrize(
    ("text", "id", "revision"),
    [
        ("gpt2", "gpt2", None),
        ("owner/name-1.5_b", "owner/name-1.5_b", None),
        ("owner/name@main", "owner/name", "main"),
        ("owner/name@refs/pr/1", "owner/name", "refs/pr/1"),
        (
            "owner/name@0123456789abcdef0123456789abcdef01234567",
            "owner/name",
            "0123456789abcdef0123456789abcdef01234567",
        ),
    ],
)
def test_hub_names(text: str, id: str, revision: str | None) -> None:
    assert parse(text) == Ref(SourceKind.HUB, id, revision)
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "a/b/c", "/a", "a/", "a b", "a@", "a@-x", "a@x/../y", "../a", "a--b", "a.git", "a\nb", "é", "x" * 600]
)
def test_invalid_hub_names(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a|is a path"):
        parse(text)


@pytest.mark.parametrize("source", [SourceKind.LOCAL, SourceKind.S3, SourceKind.PBASE])
def test_other_sources_keep_their_at(source: SourceKind) -> None:
    assert parse("some/key@home", source) == Ref(source, "some/key@home", None)


def test_the_hub_s_own_name() -> None:
    assert parse("hub:gpt2@main") == Ref(SourceKind.HUB, "gpt2", "main")
    assert parse("hub:x", SourceKind.LOCAL) == Ref(SourceKind.LOCAL, "hub:x", None)
    assert [is_plain(name) for name in ("gpt2", "gpt2@main", "a/b", "./a", "hub:gpt2", "")] == [
        True,
        True,
        *[False] * 4,
    ]


@pytest.mark.parametrize("text", ["./adapters/x", "/adapters/x", "../x", "~/x", "~x", ".", "..", "hub:./x"])
def test_a_path_is_not_a_hub_name(text: str) -> None:
    with pytest.raises(ValueError, match="is a path, not a hub id"):
        parse(text)


@given(st.text(max_size=80), st.sampled_from(SourceKind))
def test_any_text_is_a_name_or_raises_value_error(text: str, source: SourceKind) -> None:
    try:
        ref = parse(text, source)
    except ValueError as error:
        assert str(error)
    else:
        assert str(ref) == (text.removeprefix(HUB_PREFIX) if source is SourceKind.HUB else text)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\u202eb", "a\u200bb", "a\u2028b", "a\0", "\ud800"])
def test_names_that_could_not_be_shown_are_no_aliases(name: str) -> None:
    with pytest.raises(ValueError, match="an alias must be a text of 1 to 256 characters"):
        refs.check_alias(name)
    for source in SourceKind if 0 < len(name) < 257 else ():
        with pytest.raises(ValueError):
            refs.parse(f"owner/{name}", source)


@pytest.mark.parametrize("name", ["x" * 256, "Jürgens Adapter", "アダプター", "a/b@c:d"])
def test_names_of_any_language_are_aliases(name: str) -> None:
    refs.check_alias(name)
