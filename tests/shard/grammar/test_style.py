"""Drafts of a JSON schema's grammar in the usual white space, and outputs that are written in another one."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from lorikeet.proto.grammars import read_grammar_tokenizer
from lorikeet.proto.params import Grammar
from lorikeet.shard.grammar.matcher import MAX_MISSED, GrammarMatcher
from tests.shard.grammar import small_tokenizer

DEMO = Path(__file__).parents[3] / "demo" / "base"
OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A]{1,2}"}
FIELDS = {name: {"type": "string"} for name in ("name", "owner", "place", "note")}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
VALUE = dict.fromkeys(FIELDS, "x")


@cache
def tokenizer() -> LLTokenizer:
    return read_grammar_tokenizer(DEMO, 4096)


def matcher(output_ids: Sequence[int] = ()) -> GrammarMatcher:
    text = str(LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides=OPTIONS))
    made = small_tokenizer.Immediate(tokenizer, lambda: None).match(Grammar(text, proposes=True), output_ids)
    assert made.start() and not made.error
    return made


def write(made: GrammarMatcher, token_ids: list[int]) -> int:
    """Commit an output as steps would that verify its drafts. Returns the number of steps."""
    num_steps, first = 0, 0
    while first < len(token_ids):
        drafts = made.forced_ids()
        assert made.num_allowed(drafts) == len(drafts)
        agree = [left == right for left, right in zip(drafts, token_ids[first:], strict=False)]
        num_tokens = 1 + (agree.index(False) if False in agree else len(agree))
        for token_id in token_ids[first : first + num_tokens]:
            made.commit(token_id)
        first, num_steps = first + num_tokens, num_steps + 1
    assert made.is_complete and not made.error
    return num_steps


def test_usual_white_space_is_proposed() -> None:
    token_ids = tokenizer().tokenize_str(json.dumps(VALUE))
    assert write(matcher(), token_ids) < 0.5 * len(token_ids)


@pytest.mark.parametrize("separators", [(",", ":"), (",\n", ": "), (" , ", " : ")])
def test_other_white_space_ends_its_proposals(separators: tuple[str, str]) -> None:
    made = matcher()
    write(made, tokenizer().tokenize_str(json.dumps(VALUE, separators=separators)))
    assert made._style is None and made._num_missed <= MAX_MISSED


def test_an_output_is_continued_with_its_proposals() -> None:
    token_ids = tokenizer().tokenize_str(json.dumps(VALUE))
    whole = write(matcher(), token_ids)
    for cut in range(1, len(token_ids)):
        assert write(matcher(token_ids[:cut]), token_ids[cut:]) <= whole
