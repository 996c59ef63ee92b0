"""Incremental detokenization: from token ids to text, one token at a time and without broken characters.

Two implementations of one interface: concatenated bytes where tokens are bytes (byte-level and SentencePiece
vocabularies), and decoding a short window again for all other decoders. Special tokens end an incomplete character:
their text is their name, and the caller decides whether to show it.

A vocabulary's decoder is inspected once to find out which of three kinds it is; afterwards each token is a lookup.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_table() -> dict[str, int]:
    """From the printable character of a byte-level vocabulary to its byte (GPT-2's table, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF = _byte_level_table()


def _byte_level(name: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in name])
    except KeyError:  # an added token: plain text
        return name.encode()


def _replacing(replacements: list[tuple[str, str]], byte_fallback: bool) -> Callable[[str], bytes]:
    def piece(name: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            name = name.replace(old, new)
        return name.encode()

    return piece


def _piece_function(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """From a token's raw name to its bytes, or None where these depend on the neighbouring tokens.

    What a decoder strips from the start of a text is irrelevant, since generated text continues a prompt.
    """
    if decoder is None:
        return None
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level
    replacements: list[tuple[str, str]] = []
    for index, part in enumerate(parts):
        if part["type"] == "Metaspace":
            replacements.append((part["replacement"], " "))
        elif part["type"] == "Replace" and "String" in part["pattern"]:
            replacements.append((part["pattern"]["String"], part["content"]))
        elif part["type"] == "Strip" and "Fuse" in kinds[:index] and part["stop"] == 0:
            continue
        elif part["type"] not in ("ByteFallback", "Fuse"):
            return None
    return _replacing(replacements, "ByteFallback" in kinds) if replacements else None


class Vocabulary:
    """One tokenizer's tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, also_special: Iterable[int] = ()) -> None:
        self.backend = backend
        self.size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special) | frozenset(also_special)
        self._added = {index: token.content for index, token in added.items()}
        state = backend.decoder.__getstate__() if backend.decoder is not None else None
        self._piece = _piece_function(json.loads(state) if state else None)
        if self._piece is not None and not self._agrees():
            self._piece = None
        self.texts = _Texts(self)

    @property
    def is_bytewise(self) -> bool:
        """Whether the bytes of a text are the concatenated bytes of its tokens."""
        return self._piece is not None

    def raw(self, token_id: int) -> str:
        """The token's name in the vocabulary; empty for an id that has none (padded output heads)."""
        return self._added.get(token_id) or self.backend.id_to_token(token_id) or ""

    def piece(self, token_id: int) -> bytes:
        """The bytes of the token; only where `is_bytewise`."""
        name = self.raw(token_id)
        if token_id in self.special_ids:
            return name.encode()
        assert self._piece is not None
        return self._piece(name)

    def text(self, token_id: int) -> str:
        """The text of a single token, with incomplete characters as U+FFFD."""
        if self._piece is not None:
            return self.texts[token_id] or self.piece(token_id).decode(errors="replace")
        return self.backend.decode([token_id], skip_special_tokens=False)

    def _agrees(self) -> bool:
        """Whether concatenated pieces equal what the tokenizer decodes, for a sample of the vocabulary."""
        sample = [index for index in range(0, self.size, max(1, self.size // 256)) if index not in self.special_ids]
        pieces = [(index, self.piece(index)) for index in sample]
        whole = [(index, piece) for index, piece in pieces if piece.decode(errors="ignore").encode() == piece]
        expected = self.backend.decode([index for index, _ in whole], skip_special_tokens=False)
        return b"".join(piece for _, piece in whole).decode().lstrip(" ") == expected.lstrip(" ")

    def label(self, token_id: int) -> str:
        """The text of a single token, as OpenAI's `bytes:…` where its bytes are no complete characters."""
        if self._piece is None or self.texts[token_id] is not None:
            return self.text(token_id)
        return self.bytes_label(token_id)

    def bytes_label(self, token_id: int) -> str:
        """The bytes of a token as OpenAI's completions show them, such as `bytes:\\xe2\\x80`."""
        raw = self.piece(token_id) if self._piece is not None else self.text(token_id).encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class _Texts(dict[int, str | None]):
    """Text of each token whose bytes are complete characters, None for the others; filled on demand."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __missing__(self, token_id: int) -> str | None:
        try:
            text: str | None = self._vocabulary.piece(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


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
