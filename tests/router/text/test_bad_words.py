"""Bad words become the token sequences that vLLM makes of them."""

import pytest
import tokenizers

from lorikeet.router.text.tokenizer import Tokenizer, bad_word_ids
from tests.router.text.vocabularies import byte_level, sentencepiece_like

pytestmark = pytest.mark.anyio

WORDS = ["the", " fox", "jumps over", "größe", "🦊", "the fox", "x", "the"]


def expected(backend: tokenizers.Tokenizer, words: list[str]) -> set[tuple[int, ...]]:
    """vLLM's loop (`SamplingParams.update_from_tokenizer`)."""
    id_lists: list[list[int]] = []
    for word in words:
        for add_prefix_space in (False, True):
            ids = backend.encode((" " if add_prefix_space else "") + word.lstrip(), add_special_tokens=False).ids
            if not add_prefix_space or (ids[0] != id_lists[-1][0] and len(ids) == len(id_lists[-1])):
                id_lists.append(ids)
    return set(map(tuple, id_lists))


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
async def test_the_sequences_are_those_of_vllm(make: object) -> None:
    backend = byte_level() if make is byte_level else sentencepiece_like()
    tokenizer = Tokenizer(backend)
    try:
        assert set(await bad_word_ids(tokenizer, WORDS)) == expected(backend, WORDS)
    finally:
        tokenizer.close()
