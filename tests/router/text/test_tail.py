"""The end of a text has the tokens that the whole text has there; no text has fewer tokens than its least number."""

import asyncio
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lorikeet.router.errors import ValidationError
from lorikeet.router.text import tokenizer as tokenizer_module
from lorikeet.router.text.tokenizer import ASSUMED_BYTES, SEPARATING, Cuts, Tokenizer, token_length
from tests.router.text.vocabularies import SPECIAL, TEXTS, byte_level, metaspace, sentencepiece_like, word_pieces


def _trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _with_bos_and_eos(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    ids = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return tokenizer


@cache
def split(pattern: str) -> tokenizers.Tokenizer:
    """As Llama 3's and Qwen's: a regular expression, then bytes."""
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return _with_bos_and_eos(_trained(pre_tokenizers.Sequence(steps), normalizers.NFC()))


@cache
def merged_spaces(prepends: bool) -> tokenizers.Tokenizer:
    """As Llama 2's (a space before every text) or Gemma's: BPE of the whole text, with a space mark and bytes."""
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ▁.,üé\n"))
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("▁", "t"),
        ("e", "r"),
        ("▁", "▁"),
        ("▁▁", "▁▁"),
        ("▁", "f"),
        ("o", "x"),
    ]
    names = [*SPECIAL, "<unk>", *words, *letters, *("".join(pair) for pair in merges)]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [*([normalizers.Prepend("▁")] if prepends else []), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.add_special_tokens(SPECIAL)
    return _with_bos_and_eos(tokenizer)


@cache
def with_stripping_token() -> tokenizers.Tokenizer:
    """As Phi-3's: an added token that takes the spaces around it."""
    tokenizer = _trained(pre_tokenizers.ByteLevel(False))
    tokenizer.add_tokens([AddedToken("<|user|>", rstrip=True, special=True)])
    return tokenizer


CUTTABLE = {
    **{f"split {index}": lambda pattern=pattern: split(pattern) for index, pattern in enumerate(sorted(SEPARATING))},
    "gpt2": byte_level,
    "llama 2": lambda: merged_spaces(True),
    "gemma": lambda: merged_spaces(False),
    "phi 3": with_stripping_token,
}
OTHERS = {"unigram": sentencepiece_like, "metaspace": metaspace, "word pieces": word_pieces}

PIECES = st.sampled_from(
    ["the", " the", " fox", "Fox", " ", "  ", "    ", "\n", "\n\n", " \n ", "\t", "\u3000", "\x00", "x y"]
    + [" a b c d e f", "größe", "e\u0301", "日本", "🙂", "\u212a", "'s", "12", " 345", ".", "!?", *SPECIAL, "<|user|>"]
)  # fmt: skip
TEXT = st.lists(PIECES, max_size=120).map("".join)
SAMPLE = ("split 0", "llama 2", "phi 3", "unigram")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.long) for name in (*CUTTABLE, *OTHERS)]
)
@settings(max_examples=60, deadline=None)
@given(text=TEXT, num_tokens=st.integers(1, 20), special=st.booleans())
def test_the_end_has_the_same_tokens(name: str, text: str, num_tokens: int, special: bool) -> None:
    tokenizer = Tokenizer({**CUTTABLE, **OTHERS}[name]())
    for length in (2, 8, 100):
        ids = tokenizer._tail(text, num_tokens, length, special)
        assert ids == tokenizer.ids(text, special)[-num_tokens:]
    tokenizer.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.long) for name in CUTTABLE]
)
def test_only_the_end_is_tokenized(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(CUTTABLE[name]())
    text = "the lazy dog and the quick fox\n" * 20_000
    lengths: list[int] = []
    whole = tokenizer.ids(text, True)
    original = tokenizer.ids

    def counted(text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return original(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "ids", counted)
    assert asyncio.run(tokenizer.encode_tail(text, 100)) == whole[-100:]
    assert sum(lengths) < 10_000
    tokenizer.close()


@pytest.mark.parametrize("name", OTHERS)
def test_without_a_proven_cut_a_text_is_tokenized_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = OTHERS[name]()
    assert Cuts(backend).before("the fox the fox", 9) is None
    tokenizer = Tokenizer(backend)
    monkeypatch.setattr(tokenizer_module, "MAX_WHOLE_BYTES", 1000)
    with pytest.raises(ValidationError, match=r"more than 10\d\d bytes|more than 1000 bytes|more than \d+ bytes"):
        asyncio.run(tokenizer.encode_tail("the fox " * 10_000, 3))
    tokenizer.close()


@pytest.mark.parametrize(
    "token",
    [AddedToken("a b"), AddedToken("word", single_word=True), AddedToken(" x", lstrip=True), AddedToken(" word")],
)
def test_added_tokens_that_a_cut_would_change_exclude_cuts(token: AddedToken) -> None:
    tokenizer = _trained(pre_tokenizers.ByteLevel(False))
    assert Cuts(tokenizer).before("the fox jumps", 9) is not None
    tokenizer.add_tokens([token])
    assert Cuts(tokenizer).before("the fox jumps", 9) is None


def test_tokens_across_words_exclude_cuts() -> None:
    tokenizer = tokenizers.Tokenizer(
        models.BPE({name: index for index, name in enumerate([*map(chr, range(32, 127)), "e "])}, [("e", " ")])
    )
    assert Cuts(tokenizer).before("the fox jumps", 9) is None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.long) for name in (*CUTTABLE, "unigram")]
)
@settings(max_examples=80, deadline=None)
@given(text=TEXT, repeated=PIECES, times=st.integers(0, 400))
def test_no_text_has_fewer_tokens(name: str, text: str, repeated: str, times: int) -> None:
    backend = {**CUTTABLE, **OTHERS}[name]()
    length = token_length(backend)
    assert length.is_proven and length.max_bytes <= 100
    text += repeated * times
    assert length.least_tokens([text], 0) <= len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", ["metaspace", "word pieces"])
def test_without_a_proven_limit_one_is_assumed(name: str) -> None:
    length = token_length(OTHERS[name]())
    assert (length.max_bytes, length.is_proven) == (ASSUMED_BYTES, False)
    assert length.least_tokens(["x" * 1000], 10) <= 4
    assert length.least_tokens(["x" * 2561], 10) == 11
