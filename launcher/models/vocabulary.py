"""Compares the vocabularies of base and draft model, from their tokenizer files.

A draft model proposes token ids: they must mean the same in both models.
"""

import json
from pathlib import Path
from typing import Any

from lorikeet.launcher.exits import refuse
from lorikeet.launcher.models.model import ModelFolder, configuration

_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Vocabularies of tokenizers without tokenizer.json; files of the same name are compared byte by byte."""


def check(base: ModelFolder, draft: ModelFolder, tokenizer: ModelFolder | None = None) -> None:
    """Raise LauncherError that names both models if `draft` cannot propose tokens for `base`.

    `tokenizer` is the model that --draft-tokenizer-id names; the draft model's own files are compared too.
    """
    cannot = f"{draft.id} cannot be a draft model for {base.id}"
    if tokenizer is None or any((draft.path / name).exists() for name in (_FILE, *_OTHER_FILES)):
        _compare(base.path, draft.path, f"{cannot}: its tokenizer")
    if tokenizer is not None:
        _compare(base.path, tokenizer.path, f"{cannot}: its tokenizer {tokenizer.id}")
    ours, theirs = (_size(configuration(model.path)) for model in (base, draft))
    if ours is not None and theirs is not None and ours != theirs:
        _check_padding(base.path, (tokenizer or draft).path, f"{cannot}: it has {theirs} token ids, the base {ours}")


def _compare(base: Path, other: Path, whose: str) -> None:
    """Ids that only one of them has are accepted: the other never produces them."""
    if _same(base, other, _FILE):
        return
    ours, theirs = _tokens(base / _FILE), _tokens(other / _FILE)
    if ours is None or theirs is None:
        if not any(_same(base, other, name) for name in _OTHER_FILES):
            refuse(f"{whose} differs, or cannot be compared")
        return
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            refuse(f"{whose} differs: token {number} is {theirs[number]!r}, in the base model {ours[number]!r}")


def _check_padding(base: Path, other: Path, sentence: str) -> None:
    """Output heads of different sizes are accepted if the tokenizers have the same ids: the rest is padding."""
    ours, theirs = _tokens(base / _FILE), _tokens(other / _FILE)
    if None not in (ours, theirs) and ours != theirs:
        refuse(sentence)


def _size(config: dict[str, Any]) -> int | None:
    for values in (config, config.get("text_config") or {}):
        if isinstance(values, dict) and isinstance(values.get("vocab_size"), int):
            return int(values["vocab_size"])
    return None


def _same(ours: Path, theirs: Path, name: str) -> bool:
    try:
        return (ours / name).read_bytes() == (theirs / name).read_bytes()
    except OSError:
        return False


def _tokens(path: Path) -> dict[int, str] | None:
    """The texts of all ids in a tokenizer.json; None if there is none."""
    try:
        whole = json.loads(path.read_bytes())
        vocabulary = whole["model"]["vocab"]
        if isinstance(vocabulary, dict):
            found = {int(number): str(text) for text, number in vocabulary.items()}
        else:  # unigrams with their scores
            found = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
        return found | {int(added["id"]): str(added["content"]) for added in whole.get("added_tokens") or []}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        refuse(f"{path} cannot be read: {error}")
