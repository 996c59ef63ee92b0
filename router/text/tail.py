"""Places where a text can be cut so that the tokens of the rest are the last tokens of the whole text.

A cut is between an English letter and a space with another letter behind it. It is proven for BPE where the
pre-tokenizer separates pieces there (the regular expressions below), or where no token of the vocabulary contains a
letter before a space, so that no merge crosses the cut. Unigram minimizes a sum over the whole text: it has none.
"""

import re
from collections.abc import Iterable
from typing import Any

import tokenizers

from lorikeet.router.text.length import flat, kinds, state

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
    found = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                found = found or bool(step.get("use_regex", True))
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"}:
                if regex not in SEPARATING or step.get("invert"):
                    return False
                found = True
            case {"type": "Digits"}:
                pass
            case _:
                return False
    return found


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
