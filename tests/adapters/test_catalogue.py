"""What a catalogue may say, what is wrong with the rest, and how an alias's requests are shared out."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.adapters.catalogue import CatalogueEntry, CatalogueError, Version, parse, read
from lorikeet.adapters.refs import Ref, SourceKind

WHOLE = """
plain: {id: owner/plain}
full:
  source: hub
  id: owner/full
  revision: v7
  weight: 3
  pin: true
  parameters: {temperature: 0.2, max_tokens: 64, stop: END, do_sample: true}
  chat_template: "{{ messages }}"
  keys: [team-a, team-b]
here: {source: local, id: folder/a@b}
rolled: {revisions: {owner/a@v7: 0.9, owner/a@v8: 0.1}}
"""


def test_a_catalogue() -> None:
    catalogue = parse(WHOLE)
    assert catalogue.problems == {}
    entries = catalogue.entries
    assert entries["plain"] == CatalogueEntry("plain", (Version(Ref(SourceKind.HUB, "owner/plain"), 1.0),))
    full = entries["full"]
    assert full.versions[0].ref == Ref(SourceKind.HUB, "owner/full", "v7")
    assert (full.weight, full.pin, full.keys) == (3.0, True, frozenset({"team-a", "team-b"}))
    assert dict(full.parameters) == {"temperature": 0.2, "max_new_tokens": 64, "stop": ["END"], "do_sample": True}
    assert full.chat_template == "{{ messages }}"
    assert entries["here"].versions[0].ref == Ref(SourceKind.LOCAL, "folder/a@b")
    assert [version.ref.revision for version in entries["rolled"].versions] == ["v7", "v8"]
    assert parse(f"adapters:\n  {WHOLE.strip().replace(chr(10), chr(10) + '  ')}").entries == entries
    assert parse("") == parse("{}") == parse("adapters: {}")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ("{}", "neither `id` nor `revisions`"),
        ("owner/name", "must be a mapping"),
        ("{id: 3}", "an id must be a text"),
        ("{id: a b}", "is not a hub id"),
        ("{id: a, sauce: hub}", "unknown fields: sauce"),
        ("{id: a, source: pbase}", "`source` must be one of hub, local, s3"),
        ("{id: a, weight: 0}", "`weight` must be a number above 0"),
        ("{id: a, weight: .inf}", "`weight` must be a number above 0"),
        ("{id: a, weight: true}", "`weight` must be a number above 0"),
        ("{id: a, pin: 1}", "`pin` must be true or false"),
        ("{id: a@v1, revision: v2}", "give two revisions"),
        ("{id: a, revision: -x}", "is not a revision"),
        ("{id: a, source: local, revision: v1}", "is for the hub only"),
        ("{id: a, revisions: {a@v1: 1}}", "replaces `id`"),
        ("{revisions: [a@v1]}", "must map names"),
        ("{revisions: {a@v1: 0.5, a@v2: 0.4}}", "must add up to 1, not 0.9"),
        ("{revisions: {a@v1: 2, a@v2: -1}}", "numbers above 0"),
        ("{id: a, parameters: {temprature: 1}}", "unknown field 'temprature'"),
        ("{id: a, parameters: {temperature: warm}}", "`temperature` of `parameters` cannot be 'warm'"),
        ("{id: a, parameters: {top_k: 1.5}}", "`top_k` of `parameters` cannot be 1.5"),
        ("{id: a, parameters: {speculative_tokens: many}}", "`speculative_tokens` of `parameters` cannot be 'many'"),
        ("{id: a, parameters: {speculative_method: 3}}", "`speculative_method` of `parameters` cannot be 3"),
        ("{id: a, parameters: {stop: [1]}}", "`stop` of `parameters`"),
        ("{id: a, parameters: [1]}", "`parameters` must be a mapping"),
        ("{id: a, chat_template: none.jinja}", "cannot be read: No such file"),
        ("{id: a, chat_template: 1}", "`chat_template` must be"),
        ("{id: a, keys: team-a}", "`keys` must be a list"),
        ("{id: a, keys: []}", "`keys` must be a list"),
    ],
)
def test_a_broken_entry_is_named_and_the_others_stay(fields: str, part: str) -> None:
    catalogue = parse(f"good: {{id: a}}\nbad: {fields}\n")
    assert list(catalogue.entries) == ["good"]
    assert part in catalogue.problems["bad"]


@pytest.mark.parametrize("alias", ['""', "3", "null", '"a\\nb"', "x" * 300, "[1]"])
def test_what_is_no_alias(alias: str) -> None:
    catalogue = parse(f"{{? {alias} : {{id: a}}}}") if alias != "[1]" else None
    if catalogue is not None:
        assert catalogue.entries == {} and len(catalogue.problems) == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: {id: x}\na: {id: y}", "'a' is given twice in line 2"),
        ("a: {id: x, id: y}", "'id' is given twice"),
        ("- a\n- b", "must be a mapping"),
        ("a: [", "it is not YAML"),
        ("a: !!python/object/apply:os.system [ls]", "it is not YAML"),
        ("? [1]\n: {id: a}", "it is not YAML"),
        (b"a: \x80", "it is not YAML"),
    ],
)
def test_what_is_no_catalogue(text: str | bytes, part: str) -> None:
    with pytest.raises(CatalogueError) as caught:
        parse(text)
    assert part in str(caught.value)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "list.yaml").write_text("a: {id: x, chat_template: chat.jinja}")
    assert read(tmp_path / "list.yaml").entries["a"].chat_template == "{{ messages }}"
    with pytest.raises(CatalogueError, match="cannot be read"):
        read(tmp_path / "none.yaml")
    with pytest.raises(CatalogueError, match=r"list\.yaml: it must be"):
        (tmp_path / "list.yaml").write_text("text")
        read(tmp_path / "list.yaml")


def test_a_roll_out_follows_its_shares_and_keeps_to_each_user() -> None:
    entry = parse("a: {revisions: {x@1: 0.7, x@2: 0.2, x@3: 0.1}}").entries["a"]
    users = [f"user {number}" for number in range(20_000)]
    counts = Counter(entry.choose(user).ref.revision for user in users)
    assert counts["1"] / len(users) == pytest.approx(0.7, abs=0.02)
    assert counts["3"] / len(users) == pytest.approx(0.1, abs=0.02)
    assert all(entry.choose(user) == entry.choose(user) for user in users[:100])
    other = parse("b: {revisions: {x@1: 0.5, x@2: 0.5}}").entries["b"]
    half = parse("a: {revisions: {x@1: 0.5, x@2: 0.5}}").entries["a"]
    assert any(other.choose(user).ref != half.choose(user).ref for user in users[:100]), "aliases are independent"


@given(st.text(max_size=200))
def test_any_text_is_a_catalogue_or_a_sentence(text: str) -> None:
    try:
        parse(text)
    except CatalogueError as error:
        assert str(error)
