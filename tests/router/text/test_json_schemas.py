"""JSON schemas in the grammar engine's words: what means the same is accepted, what cannot be enforced is named."""

import itertools
import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lorikeet.proto.grammars import GRAMMAR_LIMITS, grammar_tokenizer
from lorikeet.router.text.grammar_process import check
from lorikeet.router.text.json_schemas import MAX_INTEGER, SchemaError, enforced


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(["<end>", *alphabet])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


@pytest.fixture(scope="module")
def tokenizer(backend: Tokenizer) -> LLTokenizer:
    return grammar_tokenizer(backend.to_str(), None, [0])


def accepted(tokenizer: LLTokenizer, backend: Tokenizer, schema: Any, texts: list[str]) -> list[str]:
    """Those of the texts that match."""
    answer = check(tokenizer, "json_schema", schema)
    assert "grammar" in answer, answer
    start = LLMatcher(tokenizer, answer["grammar"], limits=GRAMMAR_LIMITS, log_level=0)
    accepted_texts = []
    for text in texts:
        matcher, ids = start.deep_copy(), backend.encode(text, add_special_tokens=False).ids
        if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
            accepted_texts.append(text)
    return accepted_texts


CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string", "pattern": r"^\d$"}, ['"7"'], ['"٣"', '"a"']),
    ({"type": "string", "pattern": r"^[^\d]\D$"}, ['"٣a"'], ['"1a"', '"a1"']),
    ({"type": "string", "pattern": r"^\w[\w-]$"}, ['"a_"', '"a-"'], ['"éa"', '"aé"']),
    ({"type": "string", "pattern": r"^\W[\W]$"}, ['"éé"'], ['"aé"', '"é_"']),
    ({"type": "string", "pattern": r"^\s[\s]$"}, ['"\u00a0\ufeff"', '"\u2028 "'], ['"\u0085 "', '" \u180e"']),
    ({"type": "string", "pattern": r"^\S[^\s]$"}, ['"\u0085a"'], ['"\ufeffa"', '"a\u00a0"']),
    ({"type": "string", "pattern": "^.$"}, ['"é"'], ['"\u2028"', '"\\n"']),
    ({"type": "string", "pattern": r"^[a&&b]{,2}\/\u0041\x42\cI[[]$"}, ['"&{,2}/AB\\t["'], ['"a/AB\\t["']),
    ({"type": "string", "pattern": "^[^]$"}, ['"]"'], ['""']),
    ({"type": "string", "pattern": r"^\ud83d\ude42$"}, ['"🙂"'], ['"🙃"']),
    ({"type": "object", "patternProperties": {r"^\d$": {"const": 1}}, "additionalProperties": False},
     ['{"1":1}', "{}"], ['{"٣":1}', '{"a":1}']),
    ({"type": "array", "uniqueItems": False, "minItems": 2.0, "maxItems": 2.0}, ["[1,1]"], ["[1]", "[1,1,1]"]),
    ({"type": "string", "format": "password", "minLength": 1.0}, ['"a"'], ['""']),
    ({"properties": {"format": {"format": "binary", "type": "string"}, "uniqueItems": {"const": 1}},
      "required": ["format", "uniqueItems"], "type": "object", "additionalProperties": False},
     ['{"format":"x","uniqueItems":1}'], ['{"format":"x"}']),
    ({"$ref": "#/definitions/List[int]", "definitions": {"List[int]": {"const": "a b"}}}, ['"a b"'], ['"ab"']),
    ({"type": "integer"}, ["0", "-7", "1" * 19, str(MAX_INTEGER)], ["1" * 20, str(MAX_INTEGER + 1), "00"]),
    ({"type": ["integer", "null"], "minimum": 3}, ["3", "null", "1" * 19], ["2", "1" * 30]),
    ({"type": "integer", "multipleOf": 5}, ["10"], ["11", "5" * 30]),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**63 - 1}, [str(2**53 + 2)], [str(2**53), str(2**63)]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, ["0", "-" + "1" * 19], [str(2**64 + 1)]),
    ({"type": "integer", "exclusiveMinimum": 2**60, "maximum": 2**61}, [str(2**60 + 256)], [str(2**60)]),
    ({"type": "integer", "exclusiveMaximum": 2**60, "minimum": 0.5}, [str(2**60 - 128), "1"], [str(2**60), "0"]),
    ({"type": "number", "minimum": 2**53 + 1, "maximum": 1e30}, [str(2**53 + 2)], [str(2**53)]),
    ({"enum": [2**53, 0.5, "x", True]}, [str(2**53), "0.5", '"x"', "true"], [str(2**53 + 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=range(len(CASES)))
def test_a_schema_means_what_it_says(
    tokenizer: LLTokenizer, backend: Tokenizer, schema: Any, good: list[str], bad: list[str]
) -> None:
    assert accepted(tokenizer, backend, schema, [*good, *bad]) == good
    made, left_out = enforced(schema)
    assert not left_out and enforced(made) == (made, [])


REFUSED: list[tuple[Any, str]] = [
    (
        {"enum": [1147483647123456789]},
        "the number 1147483647123456789, beyond 2^53, cannot be enforced, at enum: use",
    ),
    ({"properties": {"id": {"const": {"a": [2.0**60]}}}}, "the number 1152921504606846976, beyond 2^53, cannot be enf"),
    ({"type": "integer", "minimum": 2**60, "maximum": 2**60}, "a range of numbers"),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "a range of numbers"),
    ({"type": "integer", "minimum": 2**64}, "cannot be enforced, at minimum"),
    ({"type": "number", "exclusiveMaximum": -(2**64)}, "cannot be enforced, at exclusiveMaximum"),
    ({"items": {"uniqueItems": True}}, "the keyword `uniqueItems` cannot be enforced, at items.uniqueItems"),
    ({"anyOf": [{"not": {}}]}, "the keyword `not` cannot be enforced, at anyOf[0].not"),
    ({"pattern": "^(?!a)b"}, "look-around, (?!…), in a pattern cannot be enforced, at pattern"),
    ({"pattern": r"\bfoo"}, r"the word boundary \b"),
    ({"pattern": r"(a)\1"}, r"the back-reference \1"),
    ({"patternProperties": {"(?<=a)b": {}}}, "look-around"),
    ({"format": "idn-email"}, "the format `idn-email`"),
    ({"$ref": "https://example.com/x"}, "the reference https://example.com/x to another document"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_enforced_is_named_or_left_out(
    tokenizer: LLTokenizer, backend: Tokenizer, schema: Any, words: str
) -> None:
    with pytest.raises(SchemaError) as refused:
        enforced(schema)
    assert words in str(refused.value)
    assert words in check(tokenizer, "json_schema", schema)["error"]
    made, left_out = enforced(schema, is_strict=False)
    assert len(left_out) == 1 and left_out[0].split("[")[0].split(".")[0] in schema
    assert accepted(tokenizer, backend, made, []) == []


def test_overlapping_alternatives(tokenizer: LLTokenizer, backend: Tokenizer) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    answer = check(tokenizer, "json_schema", schema)
    assert answer == {"error": "alternatives of `oneOf` that may overlap cannot be enforced: use `anyOf`"}
    made, left_out = enforced(schema, is_strict=False)
    assert left_out == ["oneOf"] and accepted(tokenizer, backend, made, ["1", "1.5"]) == ["1", "1.5"]


def decimal_pattern(digits: int | None, places: int | None) -> str:
    """As pydantic writes it."""
    start = r"^(?!^[-+.]*$)[+-]?0*"
    if digits is not None and places is not None:
        whole = max(0, digits - places)
        fraction = rf"(?=[\d.]{{1,{digits + 1}}}0*$)\d{{0,{whole}}}\.\d{{0,{places}}}0*$"
        return f"{start}(?:\\d{{0,{whole}}}|{fraction})"
    if digits is not None:
        return rf"{start}(?:\d{{0,{digits}}}|(?=[\d.]{{1,{digits + 1}}}0*$)\d*\.\d*0*$)"
    return start + (r"\d*\.?\d*$" if places is None else rf"\d*\.?\d{{0,{places}}}0*$")


@pytest.mark.parametrize(("digits", "places"), [(None, None), (None, 1), (2, None), (3, 2), (2, 3)])
def test_the_pattern_of_a_decimal(
    tokenizer: LLTokenizer, backend: Tokenizer, digits: int | None, places: int | None
) -> None:
    """Every answer matches. pydantic's alternative without a point lacks its end, which is not used here."""
    pattern = decimal_pattern(digits, places)
    texts = ["".join(letters) for length in range(5) for letters in itertools.product("+019.-", repeat=length)]
    matches = accepted(tokenizer, backend, {"type": "string", "pattern": pattern}, [json.dumps(text) for text in texts])
    ended = pattern.replace("}|", "}$|")
    assert [json.loads(matched) for matched in matches] == [matched for matched in texts if re.search(ended, matched)]
