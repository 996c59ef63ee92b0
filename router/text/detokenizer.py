"""Incremental detokenization: from token ids to text, one token at a time and without broken characters.

Two implementations of one interface: concatenated bytes where tokens are bytes (byte-level and SentencePiece
vocabularies), and decoding a short window again for all other decoders. Special tokens end an incomplete character:
their text is their name, and the caller decides whether to show it.
"""

import codecs
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from lorikeet.router.text.vocabulary import Vocabulary


class Detokenizer(Protocol):
    """The text of one growing sequence of tokens."""

    num_earlier: int
    """Characters at the start of the last token's text that are an incomplete character of earlier tokens."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """The rest of an incomplete character, as U+FFFD."""


class BytewiseDetokenizer:
    """Holds the bytes of at most one incomplete character."""

    __slots__ = ("_pending", "_special_ids", "_texts", "_vocabulary", "num_earlier")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.num_earlier = 0
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts
        self._special_ids = vocabulary.special_ids
        self._pending = b""

    def push(self, token_id: int) -> str:
        self.num_earlier = 0
        if not self._pending:
            text = self._texts[token_id]
            if text is not None:
                return text
        elif token_id in self._special_ids:
            tail = self.flush()
            self.num_earlier = len(tail)
            return tail + (self._texts[token_id] or "")
        piece = self._vocabulary.piece(token_id)
        data = self._pending + piece
        if self._pending and piece and self._is_broken_by(piece):
            self.num_earlier = len(self._pending.decode(errors="replace"))
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def _is_broken_by(self, piece: bytes) -> bool:
        """Whether the incomplete character does not continue in `piece`, and is shown as one U+FFFD or two."""
        text, consumed = codecs.utf_8_decode(self._pending + piece[:1], "replace", False)
        return len(text) > 1 or consumed == len(self._pending)

    def flush(self) -> str:
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text


class WindowedDetokenizer:
    """Decodes the last tokens again with each new one, and returns what was added.

    The window starts within the prompt, since decoders may treat the first token of a text differently (word pieces,
    stripped spaces).
    """

    __slots__ = ("_backend", "_decoded", "_ids", "_shown", "_special_ids", "_vocabulary", "num_earlier")

    context = 6
    """Preceding tokens on which the text of a token may depend."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._special_ids = vocabulary.special_ids
        self._ids = [token_id for token_id in prompt_ids[-self.context :] if token_id not in self._special_ids]
        self._shown = self._decoded = self._decode(self._ids)
        """The text that was returned, and that of all tokens, which may end with an incomplete character."""
        self.num_earlier = 0

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids:
            tail = self.flush()
            self.num_earlier = len(tail)
            return tail + self._vocabulary.raw(token_id)
        self._ids.append(token_id)
        text = self._decode(self._ids)
        incomplete, added = self._decoded[len(self._shown) :], text[len(self._shown) :]
        self.num_earlier = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(incomplete, added, strict=False))
        )
        self._decoded = text
        if text.endswith("\ufffd"):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        added = text[len(self._shown) :]
        if len(self._ids) > 2 * self.context:
            self._ids = self._ids[-self.context :]
            text = self._decode(self._ids)
        self._shown = self._decoded = text
        return added

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def detokenizer(vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> Detokenizer:
    """The implementation for this vocabulary, for text that continues `prompt_ids`."""
    if vocabulary.is_bytewise:
        return BytewiseDetokenizer(vocabulary)
    return WindowedDetokenizer(vocabulary, prompt_ids)
