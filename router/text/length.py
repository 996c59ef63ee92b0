"""The smallest number of tokens that a text can have, without tokenizing it.

A text of n bytes has at least n / m tokens, where m is the largest number of bytes that one token stands for. There is
no such m where the tokenizer drops text (most normalizers of WordPiece and of older Unigram models) or where one token
stands for any number of unknown characters.

A text can be cut between an English letter and a space with another letter after it, so that the tokens of the rest are
the last tokens of the whole text. This is proven for BPE if the pre-tokenizer separates pieces there, or if no token
contains a letter before a space, so that no merge crosses the cut. Unigram minimizes a sum over the text: it has none.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers

ASSUMED_BYTES = 256
"""Per token, for tokenizers without a limit: tokenizing longer prompts would cost gigabytes."""
_NFC_SHRINKS = 4
"""At most so many bytes become one under NFC: 3.5 for U+0390, 3 for the Kelvin sign, which becomes K."""
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts"})
"""Pre-tokenizers that keep every character."""
_SPACES = tuple(
    map(
        chr, (9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
    )
)


@dataclass(frozen=True)
class TokenLength:
    """Token length of one tokenizer: the maximum bytes of text per token."""

    max_bytes: int
    skips_spaces: bool = False
    """Whether an added token may stand for any number of spaces around it."""
    is_proven: bool = True
    """False where `max_bytes` is ASSUMED_BYTES."""

    def least_tokens(self, texts: list[str], enough: int) -> int:
        """The smallest number of tokens that the texts, joined, can have; exact only where it is above `enough`."""
        limit = enough * self.max_bytes
        if 4 * sum(map(len, texts)) <= limit:
            return 0
        num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if num_bytes > limit and self.skips_spaces:
            num_bytes -= sum(text.count(space) * len(space.encode()) for text in texts for space in _SPACES)
        return -(-num_bytes // self.max_bytes)


def token_length(backend: tokenizers.Tokenizer) -> TokenLength:
    """Token length of `backend`, from its parts."""
    normalizer, pre_tokenizer = state(backend.normalizer), state(backend.pre_tokenizer)
    shrinks = _shrinks(normalizer)
    added = backend.get_added_tokens_decoder().values()
    names = set(backend.get_vocab(with_added_tokens=False))
    is_byte_level = "ByteLevel" in kinds(normalizer) | kinds(pre_tokenizer)
    if shrinks is None or not _keeps(pre_tokenizer) or not _has_all(backend.model, names, is_byte_level):
        return TokenLength(ASSUMED_BYTES, is_proven=False)
    longest = max((len(name) if is_byte_level else len(name.encode()) for name in names), default=1)
    longest = max([longest, 4, *(len(token.content.encode()) for token in added)])
    skips_spaces = any(token.lstrip or token.rstrip for token in added)
    return TokenLength(longest * shrinks, skips_spaces)


def state(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as in tokenizer.json."""
    content: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return content


def flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for step in part.get("normalizers") or part.get("pretokenizers") or [] for step in flat(step)]


def kinds(part: dict[str, Any] | None) -> set[str]:
    return {step["type"] for step in flat(part)}


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """The most bytes that the normalizer turns into one; None where it removes text."""
    factor = 1
    for step in flat(normalizer):
        match step:
            case {"type": "ByteLevel" | "Prepend"}:
                pass
            case {"type": "NFC"}:
                factor *= _NFC_SHRINKS
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
                factor *= max(1, -(-len(old.encode()) // len(new.encode())))
            case _:
                return None
    return factor


def _keeps(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether every character is part of a piece."""
    return all(
        step["type"] in _KEEPING or (step["type"] == "Split" and step.get("behavior") != "Removed")
        for step in flat(pre_tokenizer)
    )


def _has_all(model: Any, names: set[str], is_byte_level: bool) -> bool:
    """Whether unknown characters give tokens, at least one for each."""
    if is_byte_level:
        return names.issuperset(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    has_bytes = names.issuperset(f"<0x{byte:02X}>" for byte in range(256))
    match type(model).__name__:
        case "BPE":
            one_each = model.unk_token is not None and not model.fuse_unk
            return one_each or (model.byte_fallback and has_bytes)
        case "Unigram":
            return has_bytes and bool((state(model) or {}).get("byte_fallback"))
    return False


_WORD, _MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
_CONTRACTIONS, _BLANKS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s+(?!\S)|\s+"
_LINES = r"\n+ *(?= )"
_PATTERNS = {
    "GPT-2": ("'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", _MARKS, _BLANKS),
    "Llama 3": (_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _MARKS + r"[\r\n]*", r"\s*[\r\n]+", _BLANKS),
    "Qwen2": (_CONTRACTIONS, _WORD, r"\p{N}", _MARKS + r"[\r\n]*", r"\s*[\r\n]+", _BLANKS),
    "the demo model": (_WORD, r"\p{N}{1,3}", rf"{_MARKS}(?:{_LINES}|\n+)?", _LINES, r"\n+", _BLANKS),
}
SEPARATING = frozenset(map("|".join, _PATTERNS.values()))
"""Regular expressions of which no match contains a letter before a space, and which never look back."""
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LETTER_SPACE = re.compile("[A-Za-z][ ▁]")
_MAX_TRIES = 1000


class Cuts:
    """Cuts for one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._offset = _offset(backend)
        """Start of the rest after the space: 1 where the normalizer writes a space before texts; None without cuts."""

    def __bool__(self) -> bool:
        return self._offset is not None

    def before(self, text: str, position: int) -> int | None:
        """The start of the rest for the last cut before `position`; None where none is near."""
        if self._offset is None:
            return None
        for _ in range(_MAX_TRIES):
            position = text.rfind(" ", 1, position)
            if position < 0:
                return None
            if text[position - 1] in _LETTERS and text[position + 1 : position + 2] in _LETTERS:
                return position + self._offset
        return None


def _offset(backend: tokenizers.Tokenizer) -> int | None:
    model: Any = backend.model
    if type(model).__name__ != "BPE" or model.dropout or not _added_tokens_allow_it(backend):
        return None
    normalizer, pre_tokenizer = flat(state(backend.normalizer)), flat(state(backend.pre_tokenizer))
    offset = _normalized_offset(normalizer)
    if offset is None:
        return None
    if not offset and not kinds(state(backend.normalizer)) & {"Replace"} and _separates(pre_tokenizer):
        return 0
    names = backend.get_vocab(with_added_tokens=False)
    if not (names.keys() >= _LETTERS and names.keys() & {" ", "▁"}):
        return None  # unknown characters may be joined
    is_plain = all(step["type"] == "Metaspace" for step in pre_tokenizer) and not model.ignore_merges
    return offset if is_plain and not any(map(_LETTER_SPACE.search, names)) else None


def _normalized_offset(steps: list[dict[str, Any]]) -> int | None:
    """None for normalizers that could change what is next to a cut differently in the rest."""
    offset = 0
    for step in steps:
        match step:
            case {"type": "NFC"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case {"type": "Prepend", "prepend": "▁"}:
                offset = 1
            case _:
                return None
    return offset


def _separates(steps: list[dict[str, Any]]) -> bool:
    """Whether the pre-tokenizer starts a new piece at each cut, from whatever place before it starts."""
    is_cut = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                is_cut = is_cut or bool(step.get("use_regex", True))
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"}:
                if regex not in SEPARATING or step.get("invert"):
                    return False
                is_cut = True
            case {"type": "Digits"}:
                pass
            case _:
                return False
    return is_cut


def _added_tokens_allow_it(backend: tokenizers.Tokenizer) -> bool:
    """Whether no added token is found across a cut, or depends on what is around it."""
    return not any(_touches_cuts(token) for token in backend.get_added_tokens_decoder().values())


def _touches_cuts(token: tokenizers.AddedToken) -> bool:
    content: str = token.content
    if _LETTER_SPACE.search(content):
        return True
    ends: Iterable[str] = (content[:1], content[-1:])
    if token.lstrip or token.rstrip or token.single_word:
        return any(end in _LETTERS or end in " ▁" for end in ends)
    return content[:1] in (" ", "▁") and content[1:2] in _LETTERS
