"""Bad words as token sequences, as in vLLM: each word as it begins a text and as it follows a space."""

from collections.abc import Sequence

from lorikeet.router.text.tokenizer import Tokenizer


async def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str], caller: str = "") -> tuple[tuple[int, ...], ...]:
    """The token sequences that must not occur, without duplicates.

    The word after a space counts only where it is another single token, or a sequence of the same length that begins
    with another token: otherwise the space is a token of its own, and the first sequence covers both.
    """
    found: dict[tuple[int, ...], None] = {}
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    sequences = list(map(tuple, await tokenizer.encode_each(texts, caller=caller))) if texts else []
    for bare, spaced in zip(sequences[::2], sequences[1::2], strict=True):
        found[bare] = None
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = None
    return tuple(ids for ids in found if ids)
