"""The tokens that an adapter's tokenizer files add to the base's. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorikeet.adapters.errors import AdapterInvalid

FILES = frozenset({"tokenizer.json", "tokenizer_config.json", "added_tokens.json"})
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_MOST = 65_536


@dataclass(frozen=True)
class AddedToken:
    """A token as `tokenizers` adds it."""

    content: str
    id: int
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    single_word: bool = False


@dataclass(frozen=True)
class Added:
    """What an adapter adds to the base's tokenizer."""

    tokens: tuple[AddedToken, ...] = ()
    """With the ids that follow the base's, in order."""
    eos: str = ""
    """The one of them that ends a text; empty for none."""


def read(files: Mapping[str, bytes], base: Mapping[str, int]) -> Added:
    """`base`: the base's tokens and their ids. A token for padding alone is left out: no text has it.

    Raises AdapterInvalid for files that cannot be read, and for ids that do not follow the base's.
    """
    try:
        settings = _object(files, "tokenizer_config.json")
        declared = _declared(files, settings)
        padding, eos = (_content(settings.get(name)) for name in ("pad_token", "eos_token"))
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise AdapterInvalid("its tokenizer files cannot be read") from None
    tokens = sorted((token for token in declared if token.content not in base), key=lambda token: token.id)
    if not tokens or [token.content for token in tokens] == [padding]:
        return Added()
    first = max(base.values(), default=-1) + 1
    if len(tokens) > _MOST or [token.id for token in tokens] != list(range(first, first + len(tokens))):
        raise AdapterInvalid(
            f"it adds tokens whose ids do not follow those of the base's tokenizer, which end before {first}"
        )
    return Added(tuple(tokens), eos if eos in {token.content for token in tokens} else "")


def _declared(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> list[AddedToken]:
    """One for each content: the first file that has it decides."""
    whole, decoder = _object(files, "tokenizer.json"), settings.get("added_tokens_decoder") or {}
    entries = [(entry["content"], entry["id"], entry) for entry in whole.get("added_tokens") or ()]
    entries += [(_content(entry), id, entry if isinstance(entry, dict) else {}) for id, entry in decoder.items()]
    entries += [(content, id, {}) for content, id in _object(files, "added_tokens.json").items()]
    found: dict[str, AddedToken] = {}
    for content, id, entry in entries:
        flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
        found.setdefault(str(content), AddedToken(str(content), int(id), **flags))
    return list(found.values())


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(files.get(name, b"{}"))
    return content


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
