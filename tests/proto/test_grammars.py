"""Grammars over vocabularies with added tokens: what a mask allows is accepted, as one token or spelled."""

import json
import random
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lorikeet.proto.grammars import GRAMMAR_LIMITS, grammar_tokenizer, read_grammar_tokenizer

ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[X]")
SPECIAL = ("<|end|>", "<|turn|>")
NAMED = "<pad>"
"""Added as text; the tokenizer's configuration names it."""
ENUM = {"enum": ["<tool_call>", "a</think>b", "<|turn|>"]}
GRAMMARS: dict[str, str] = {
    "forced": 'start: "<tool_call>" "a" "</tool_call>"',
    "choice": 'start: "a<think>" | "a<|turn|>b" | "[X]"',
    "named": 'start: "<pad>"',
    "expression": "start: /(<think>|<[|]turn[|]>|b){3}/",
    "one token": 'start: "a" <[TURN]> "b"',
    "its name": 'start: "a" <|turn|> "b"',
    "free text": 'start: thought "a"\nthought[lazy]: TEXT "</think>"\nTEXT: /(.|\\n){0,20}/',
    "values": f"start: %json {json.dumps(ENUM)}",
}


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    made.add_tokens([AddedToken(text, special=False) for text in (*ADDED, NAMED)])
    return made


@pytest.fixture(scope="module")
def tokenizer(backend: Tokenizer) -> LLTokenizer:
    return grammar_tokenizer(backend.to_str(), 300, [backend.token_to_id("<|end|>")], [NAMED])


def matcher(tokenizer: LLTokenizer, backend: Tokenizer, grammar: str) -> LLMatcher:
    text = llguidance.grammar_from("grammar", grammar.replace("TURN", str(backend.token_to_id("<|turn|>"))))
    made = LLMatcher(tokenizer, text, limits=GRAMMAR_LIMITS, log_level=0)
    assert not made.get_error(), made.get_error()
    return made


def allowed(matcher: LLMatcher, vocab_size: int) -> list[int]:
    mask = allocate_token_bitmask(1, vocab_size)
    fill_next_token_bitmask(matcher, mask, 0)
    return [int(each) for each in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_token_that_a_mask_allows_is_accepted(tokenizer: LLTokenizer, backend: Tokenizer, name: str) -> None:
    """No output ends in an error, whatever is drawn."""
    start, eos_id = matcher(tokenizer, backend, GRAMMARS[name]), tokenizer.eos_token
    texts = set()
    for seed in range(48):
        current, generator, drawn = start.deep_copy(), random.Random(seed), list[int]()
        while not current.is_stopped() and len(drawn) < 60:
            choices = allowed(current, tokenizer.vocab_size)
            ends = [each for each in choices if each == eos_id]
            drawn.append(generator.choice(ends or choices))
            assert all(current.validate_tokens([each]) == 1 for each in choices if each != eos_id), drawn
            assert current.consume_token(drawn[-1]), current.get_error()
        texts.add(tokenizer.decode_str([each for each in drawn if each != eos_id]))
    assert len(texts) > 1 or name in ("forced", "named", "one token", "its name")


@pytest.mark.parametrize("text", ["a<think>", "[X]"])
def test_an_added_token_is_the_text_that_it_stands_for(tokenizer: LLTokenizer, backend: Tokenizer, text: str) -> None:
    as_token = backend.encode(text, add_special_tokens=False).ids
    spelled = [backend.token_to_id(letter) for letter in text]
    assert len(as_token) < len(spelled)
    for ids in (as_token, spelled):
        current = matcher(tokenizer, backend, GRAMMARS["choice"])
        assert current.try_consume_tokens(ids) == len(ids) and current.is_accepting()


@pytest.mark.parametrize("text", ["<|turn|>", NAMED])
def test_a_special_token_is_no_text(tokenizer: LLTokenizer, backend: Tokenizer, text: str) -> None:
    """Its text is hidden in the output, which would not match; the text may be spelled."""
    grammar = f"start: {json.dumps(text)}"
    assert matcher(tokenizer, backend, grammar).try_consume_tokens([backend.token_to_id(text)]) == 0
    spelled = [backend.token_to_id(letter) for letter in text]
    assert matcher(tokenizer, backend, grammar).try_consume_tokens(spelled) == len(spelled)


def test_a_grammar_forces_the_tokens_of_the_tokenizer(tokenizer: LLTokenizer, backend: Tokenizer) -> None:
    forced = matcher(tokenizer, backend, GRAMMARS["forced"]).compute_ff_tokens()
    assert list(forced) == backend.encode("<tool_call>a</tool_call>", add_special_tokens=False).ids


def test_a_folder_names_its_ends(tmp_path: Path, backend: Tokenizer) -> None:
    """They and the tokens that it names are special, although the tokenizer has them as text."""
    settings: dict[str, Any] = {"pad_token": {"content": NAMED}}
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [backend.token_to_id("[X]"), backend.token_to_id("<|end|>")]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = read_grammar_tokenizer(tmp_path, 300)
    assert tokenizer.eos_token == ends[0] and tokenizer.vocab_size == 300
    special = {each for each in range(300) if tokenizer.is_special_token(each)}
    assert {*ends, backend.token_to_id(NAMED)} <= special
    assert not special & {backend.token_to_id(text) for text in ADDED if text != "[X]"}
