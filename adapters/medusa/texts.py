"""The target's own texts: written once per prompt, batch by batch, and kept in a file that a stopped run goes on from.

Knows prompts and the target; a running server that writes instead is in remote.py. Knows nothing of heads.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from lorikeet.adapters.errors import HeadsError
from lorikeet.adapters.medusa import prompts
from lorikeet.adapters.medusa.prompts import EncodedPrompt
from lorikeet.adapters.medusa.target import Target

OWN_PROMPT_LEN = 24
"""Tokens of a prompt that the target makes up itself."""

Told = Callable[[int, int], None]
"""Hears how many prompts of how many are done."""


@dataclass(frozen=True)
class Text:
    """A prompt and what the target wrote after it."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


class TextStore:
    """Outputs by number of prompt, appended to a file as they are written, or kept in memory alone."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Opens the file or begins it. Raises HeadsError where it holds texts of other settings."""
        self.outputs: dict[int, tuple[int, ...]] = {}
        self._file: IO[str] | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps(settings, sort_keys=True)
        if path.exists():
            self._read(path, head, settings)
        else:
            path.write_text(head + "\n")
        self._file = path.open("a", encoding="utf-8")

    def add(self, outputs: Iterable[tuple[int, Sequence[int]]]) -> None:
        """(number of the prompt, output ids) each; on disk when this returns."""
        for number, ids in outputs:
            self.outputs[number] = tuple(ids)
            if self._file is not None:
                self._file.write(json.dumps([number, list(ids)], separators=(",", ":")) + "\n")
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self, path: Path, head: str, settings: dict[str, Any]) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines[0] != head:
            raise HeadsError(_difference(path, lines[0], settings))
        whole = lines[1:-1]  # what follows the last line end was cut off when a run was stopped
        for line in whole:
            number, ids = json.loads(line)
            self.outputs[number] = tuple(ids)
        if lines[-1]:
            path.write_text("\n".join([head, *whole]) + "\n", encoding="utf-8")


def _difference(path: Path, found: str, wanted: dict[str, Any]) -> str:
    try:
        before = json.loads(found)
        names = [name for name in sorted({*before, *wanted}) if before.get(name) != wanted.get(name)]
    except (ValueError, TypeError):
        names = ["settings"]
    return f"{path} holds texts of another run (other {', '.join(names)}): give another --work, or remove that folder"


def settings_of(target: Target, encoded: Sequence[EncodedPrompt], max_new_tokens: int) -> dict[str, Any]:
    """All that the texts depend on, but for who computes them."""
    asked = hashlib.sha256(json.dumps([prompt.ids for prompt in encoded]).encode()).hexdigest()
    return {**target.identity, "prompts": asked, "length": max_new_tokens}


def fitting(encoded: Sequence[EncodedPrompt], target: Target, max_new_tokens: int) -> list[EncodedPrompt]:
    """The prompts that leave room for an answer in the model's positions. Raises HeadsError where none does."""
    room = None if target.max_len is None else target.max_len - max_new_tokens
    kept = [prompt for prompt in encoded if prompt.ids and (room is None or len(prompt.ids) <= room)]
    if not kept:
        raise HeadsError(
            f"no prompt leaves room for {max_new_tokens} new tokens in the model's {target.max_len} positions"
        )
    return kept


def write(target: Target, encoded: Sequence[EncodedPrompt], store: TextStore, writing: "Writing") -> None:
    """Let the target write whatever is missing. Prompts of like length go together: padding costs as much as text."""
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].ids))
    for start in range(0, len(order), writing.batch_size):
        batch = order[start : start + writing.batch_size]
        if not store.outputs.keys() >= set(batch):
            written = target.write([encoded[number].ids for number in batch], writing.max_new_tokens)
            store.add(zip(batch, written, strict=True))
        writing.told(len(store.outputs), len(encoded))


@dataclass(frozen=True)
class Writing:
    """How texts are written."""

    max_new_tokens: int
    batch_size: int
    """Texts at a time."""
    told: Told


def own_prompts(target: Target, number: int, batch_size: int, seed: int) -> list[EncodedPrompt]:
    """Prompts that the target makes up, sampled at temperature 1 from where every text begins."""
    begin = target.tokenizer("")["input_ids"] or [
        token for token in (target.tokenizer.bos_token_id, target.tokenizer.eos_token_id) if token is not None
    ]
    if not begin:
        raise HeadsError("the model has no token that a text begins with, so it cannot make up prompts: give --prompts")
    torch.manual_seed(seed)
    found: dict[str, None] = {}
    for _ in range(0, 4 * number, batch_size):  # some are blank or come twice
        for ids in target.write([begin[:1]] * batch_size, OWN_PROMPT_LEN, temperature=1.0):
            text = target.tokenizer.decode(ids, skip_special_tokens=True)
            if text.strip():
                found[text] = None
        if len(found) >= number:
            break
    return prompts.encode(list(found)[:number], target.tokenizer)


def texts(encoded: Sequence[EncodedPrompt], store: TextStore) -> list[Text]:
    """All texts in order of prompts, without those in which nothing was written."""
    found = [Text(prompt.ids, store.outputs[number]) for number, prompt in enumerate(encoded)]
    return [text for text in found if text.output_ids]
