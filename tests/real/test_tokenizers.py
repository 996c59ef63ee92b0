"""Tokenization and streamed text with the tokenizers of seven families and of BERT: those of transformers."""

import json
import random
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lorikeet.router.config import RouterConfig
from lorikeet.router.text.stop import StopMatcher
from lorikeet.router.text.tokenizer import Tokenizer
from tests.real import families

pytestmark = pytest.mark.real

NUM_TEXTS = 500
PIECES = (
    "Hello", "world", " the", "naïve", "I'm", "don't", "3.14159", "1234567", "0x1F", "e\u0301", "\ufb01",
    "Straße", "İstanbul", "你好，世界", "東京タワー", "안녕하세요", "مرحبا بالعالم", "שלום", "नमस्ते",
    "ภาษาไทย", "😀", "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "🇫🇷", "👍🏽", "\u200d",
    "\xa0", "\u3000", " ", "  ", "     ", "\t", "\n", "\n\n", "\r\n", "\u2028",
    "def f(x):\n    return x ** 2\n", "</div>", "{\"a\": [1, 2]}", "SELECT * FROM t;", "#include <stdio.h>\n",
    "→", "…", "«»", "€", "½", "x²", "\x00", "\x7f", "�", "\U0001d54f", "\ud7ff", "a" * 40, "ab" * 30, "!" * 17,
    "-" * 33, "<", ">", "<|", "|>", "▁", "Ġ", "##ing", "[MASK]", "<0x0A>",
)  # fmt: skip
NAMES = (*families.FAMILIES, "bert")


@cache
def folder(name: str) -> Path:
    return families.minilm() if name == "bert" else families.model(name)


@cache
def ours(name: str) -> Tokenizer:
    return Tokenizer.load(RouterConfig(model_id=name, model_path=str(folder(name)), shard_addresses=("unix:unused",)))


@cache
def theirs(name: str) -> Any:
    """What tokenizer.json and tokenizer_config.json say. AutoTokenizer makes another tokenizer of those of Llama's
    class, which drops a space at the start of a text; without the arguments transformers 5 ignores `add_bos_token`.
    """
    settings = json.loads((folder(name) / "tokenizer_config.json").read_text())
    tokens = {key: settings[key] for key in ("add_bos_token", "add_eos_token") if key in settings}
    return PreTrainedTokenizerFast.from_pretrained(folder(name), **tokens)


@cache
def texts(name: str) -> list[str]:
    """Drawn texts of all scripts with the tokenizer's added tokens, some of them broken."""
    draw = random.Random(0)
    added = [token.content for token in theirs(name).added_tokens_decoder.values()]
    some = draw.sample(added, min(len(added), 40))
    pieces = [*PIECES, *some, *(text[: len(text) // 2] for text in some[:10])]
    return ["".join(draw.choices(pieces, k=draw.randint(0, 12))) for _ in range(NUM_TEXTS)]


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_are_those_of_transformers(name: str) -> None:
    for text in texts(name):
        for special in (True, False):
            expected = theirs(name)(text, add_special_tokens=special).input_ids
            assert ours(name).ids(text, special) == expected, (text, special)


@pytest.mark.parametrize("name", NAMES)
def test_streams_add_up_to_the_text_of_transformers(name: str) -> None:
    """Also after a prompt, which decides on leading spaces, and for tokens that are no text together."""
    draw = random.Random(1)
    special = ours(name).special_ids
    known = [each for each in range(len(theirs(name))) if each not in special and ours(name).vocabulary.raw(each)]
    drawn = (draw.choices(known, k=draw.randint(1, 30)) for _ in range(NUM_TEXTS))
    prompt = theirs(name)("The answer is", add_special_tokens=False).input_ids
    start = _decoded(name, prompt)
    for ids in chain((theirs(name)(text, add_special_tokens=False).input_ids for text in texts(name)), drawn):
        if name == "bert":  # words are joined by spaces, special tokens are not; an encoder writes neither
            ids = [each for each in ids if each not in special]
        detokenizer = ours(name).detokenizer(prompt)
        chunks = [*map(detokenizer.push, ids), detokenizer.flush()]
        whole = _decoded(name, [*prompt, *ids])
        assert "".join(chunks) == whole[len(start) :], (ids, chunks)


def _decoded(name: str, ids: list[int]) -> str:
    text: str = theirs(name).decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("name", NAMES)
def test_stop_texts_inside_tokens_and_characters(name: str) -> None:
    """A stop text may begin and end anywhere in the characters of tokens, added ones too."""
    draw = random.Random(2)
    for text in texts(name):
        ids = theirs(name)(text, add_special_tokens=False).input_ids
        whole = "".join(_chunks(name, ids))
        if len(whole) < 3:
            continue
        begin = draw.randrange(len(whole) - 1)
        stop = whole[begin : begin + draw.randint(1, 6)]
        for include in (False, True):
            matcher, shown = StopMatcher([stop], include), []
            for chunk in _chunks(name, ids):
                shown.append(matcher.push(chunk))
                if matcher.matched is not None:
                    break
            end = whole.index(stop) + len(stop) * include
            assert matcher.matched == stop and "".join(shown) == whole[:end], (text, stop)


def _chunks(name: str, ids: list[int]) -> list[str]:
    detokenizer = ours(name).detokenizer([])
    return [*map(detokenizer.push, ids), detokenizer.flush()]
