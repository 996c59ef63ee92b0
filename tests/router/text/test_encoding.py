"""Texts and pairs are cut as the library cuts them, which is what transformers and sentence-transformers use."""

import pytest
import tokenizers

from lorikeet.router.errors import ValidationError
from lorikeet.router.text.tokenizer import MAX_CUT_CHARS, Cut, encode_group, groups
from tests import tiny_pooled

TEXTS = [
    "the fox",
    "a parrot repeats what the adapters say, word for word",
    "q" * 40,
    "the lazy dog jumps over the fox",
]


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return tiny_pooled.tokenizer().backend_tokenizer


def truncating(backend: tokenizers.Tokenizer, most: int, side: str) -> tokenizers.Tokenizer:
    """A tokenizer that truncates by itself, the longer of two texts first."""
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.enable_truncation(most, strategy="longest_first", direction=side)
    return copy


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [5, 8, 9, 13, 20, 60])
def test_texts_and_pairs_are_cut_as_by_the_library(backend: tokenizers.Tokenizer, most: int, side: str) -> None:
    texts = [*TEXTS, *((first, second) for first in TEXTS for second in TEXTS)]
    reference = truncating(backend, most, side)
    encodings = encode_group(backend, texts, Cut(most, side, has_types=True))
    for text, encoding in zip(texts, encodings, strict=True):
        want = reference.encode(*(text if isinstance(text, tuple) else (text,)))
        assert encoding.ids == want.ids
        types = [
            int(bool(encoding.second_text) and index >= encoding.second_text) for index in range(len(encoding.ids))
        ]
        assert types == want.type_ids


def test_special_tokens_are_left_out_on_request(backend: tokenizers.Tokenizer) -> None:
    [encoded] = encode_group(backend, ["the fox"], Cut(add_special_tokens=False))
    assert not {tiny_pooled.CLS, tiny_pooled.SEP} & set(encoded.ids)


def test_texts_that_cannot_be_cut_are_rejected(backend: tokenizers.Tokenizer) -> None:
    with pytest.raises(ValidationError, match="nothing of a text is left"):
        encode_group(backend, ["the fox"], Cut(2))
    with pytest.raises(ValidationError, match="cannot be truncated"):
        encode_group(backend, ["x" * (MAX_CUT_CHARS + 1)], Cut(8))


def test_groups_keep_the_order_and_are_bounded() -> None:
    texts = ["x" * (index % 700) for index in range(300)]
    parts = list(groups(texts))
    assert [text for part in parts for text in part] == texts
    assert max(map(len, parts)) <= 64 and len(parts) > 4
