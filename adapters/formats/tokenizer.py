"""Checks that an adapter was trained with the base's tokenizer, by the tokenizer files in its folder. Imports no torch.

Only the base's tokenizer is ever used, so an adapter whose token ids differ is rejected.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from lorikeet.adapters.errors import AdapterInvalid
from lorikeet.adapters.sources.base import MAX_SMALL_BYTES

_WHOLE = "tokenizer.json"
_ADDED = "added_tokens.json"
_SETTINGS = "tokenizer_config.json"
_MAX_CACHED = 1024


class Tokenizers:
    """Compares tokenizers with the base's and caches the results: many adapters have the same files."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._differences: dict[bytes, str | None] = {}

    def check(self, folder: Path) -> None:
        """Raises AdapterInvalid with the first token that differs."""
        files = {name: _read(folder / name) for name in (_WHOLE, _ADDED, _SETTINGS)}
        self.check_files({name: content for name, content in files.items() if content is not None})

    def check_files(self, files: dict[str, bytes]) -> None:
        """Check files by name; other files are ignored. Raises AdapterInvalid with the first token that differs."""
        files = {name: content for name, content in files.items() if name in (_WHOLE, _ADDED, _SETTINGS)}
        if not files or files.get(_WHOLE) == self._own_file:
            return
        key = hashlib.sha256(b"\0".join(files.get(name, b"") for name in (_WHOLE, _ADDED, _SETTINGS))).digest()
        if key not in self._differences:
            if len(self._differences) >= _MAX_CACHED:
                self._differences.clear()
            self._differences[key] = self._difference(files)
        if (difference := self._differences[key]) is not None:
            raise AdapterInvalid(difference)

    @cached_property
    def _own_file(self) -> bytes | None:
        return _read(self._model_path / _WHOLE)

    @cached_property
    def _own(self) -> dict[str, int]:
        """Token → id, empty if the base has no tokenizer that can be compared."""
        if self._own_file is not None:
            return _tokens(json.loads(self._own_file))
        from transformers import AutoTokenizer

        try:
            return dict(AutoTokenizer.from_pretrained(self._model_path, local_files_only=True).get_vocab())
        except (ValueError, OSError, KeyError, ImportError):
            return {}

    def _difference(self, files: dict[str, bytes]) -> str | None:
        """The end of a sentence, or None if every token of the adapter is one of the base."""
        base_tokens = self._own
        if not base_tokens:
            return None
        try:
            settings = json.loads(files.get(_SETTINGS, b"{}"))
            tokens = _all_tokens(files, settings)
            padding = _content(settings.get("pad_token"))
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return "its tokenizer files cannot be read"
        for token, number in tokens.items():
            # a token that is only used for padding in training never reaches the adapter
            if base_tokens.get(token) != number and (token != padding or token in base_tokens):
                has = f"{base_tokens[token]} in the base's" if token in base_tokens else "is not in the base's"
                return (
                    f"it was trained with another tokenizer: token {token[:40]!r} is {str(number)[:40]} there and {has}"
                )
        return None


def _all_tokens(files: dict[str, bytes], settings: Any) -> dict[str, int]:
    tokens: dict[str, int] = {}
    if _WHOLE in files:
        tokens.update(_tokens(json.loads(files[_WHOLE])))
    if _ADDED in files:
        tokens.update({str(token): int(number) for token, number in json.loads(files[_ADDED]).items()})
    for number, entry in (settings.get("added_tokens_decoder") or {}).items():
        tokens[str(_content(entry))] = int(number)
    return tokens


def _tokens(content: Any) -> dict[str, int]:
    vocab = content["model"]["vocab"]
    tokens = dict(vocab) if isinstance(vocab, dict) else {str(entry[0]): number for number, entry in enumerate(vocab)}
    tokens.update({str(entry["content"]): entry["id"] for entry in content.get("added_tokens") or ()})
    return tokens


def _content(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SMALL_BYTES + 1)
    except OSError:
        return None
    if len(content) > MAX_SMALL_BYTES:
        raise AdapterInvalid(f"{path.name} has more than {MAX_SMALL_BYTES} bytes")
    return content
