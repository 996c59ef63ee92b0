"""The target's own texts: generated once per prompt, in batches, and kept in a file from which a stopped run resumes.

`remote` generates them with a running server instead.
"""

import hashlib
import io
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
"""Tokens of a prompt that the target samples."""

Progress = Callable[[int, int], None]
"""Called with the number of finished prompts and of all prompts."""


@dataclass(frozen=True)
class Text:
    """A prompt and the target's continuation."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


class TextStore:
    """Outputs by prompt number, appended to a file as they are generated, or kept in memory only."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Opens or creates the file. Raises HeadsError if it holds texts of other settings."""
        self.outputs: dict[int, tuple[int, ...]] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            head = json.dumps(settings, sort_keys=True)
            if path.exists():
                self._read(path, head, settings)
            else:
                path.write_text(head + "\n")
        self._file: IO[str] = io.StringIO() if path is None else path.open("a", encoding="utf-8")

    def add(self, outputs: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Pairs of prompt number and output ids; they are flushed when this returns."""
        for number, ids in outputs:
            self.outputs[number] = tuple(ids)
            self._file.write(json.dumps([number, list(ids)], separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _read(self, path: Path, head: str, settings: dict[str, Any]) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines[0] != head:
            raise HeadsError(_difference(path, lines[0], settings))
        whole = lines[1:-1]  # an unfinished last line is left behind by a stopped run
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
    return f"{path} holds texts of another run (other {', '.join(names)}): use another --work, or delete that folder"


def settings_of(target: Target, encoded: Sequence[EncodedPrompt], max_new_tokens: int) -> dict[str, Any]:
    """Everything that the texts depend on, except the machine that computes them."""
    asked = hashlib.sha256(json.dumps([prompt.ids for prompt in encoded]).encode()).hexdigest()
    return {**target.identity, "prompts": asked, "length": max_new_tokens}


def fitting(encoded: Sequence[EncodedPrompt], target: Target, max_new_tokens: int) -> list[EncodedPrompt]:
    """The prompts short enough for an answer of `max_new_tokens`. Raises HeadsError if there is none."""
    room = None if target.max_len is None else target.max_len - max_new_tokens
    kept = [prompt for prompt in encoded if prompt.ids and (room is None or len(prompt.ids) <= room)]
    if not kept:
        raise HeadsError(f"no prompt leaves room for {max_new_tokens} tokens in the model's {target.max_len} positions")
    return kept


def write_with_target(target: Target, encoded: Sequence[EncodedPrompt], store: TextStore, writing: "Writing") -> None:
    """Let the target generate the missing texts. Batches have prompts of similar length, because padding costs time."""
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].ids))
    for start in range(0, len(order), writing.batch_size):
        batch = order[start : start + writing.batch_size]
        if not store.outputs.keys() >= set(batch):
            written = target.write([encoded[number].ids for number in batch], writing.max_new_tokens)
            store.add(zip(batch, written, strict=True))
        writing.progress(len(store.outputs), len(encoded))


@dataclass(frozen=True)
class Writing:
    """How texts are generated."""

    max_new_tokens: int
    batch_size: int
    """Texts at a time."""
    progress: Progress


def own_prompts(target: Target, number: int, batch_size: int, seed: int) -> list[EncodedPrompt]:
    """Prompts that the target samples at temperature 1 from the start of a text."""
    begin = target.tokenizer("")["input_ids"] or [
        token for token in (target.tokenizer.bos_token_id, target.tokenizer.eos_token_id) if token is not None
    ]
    if not begin:
        raise HeadsError("the model has no token that begins a text, so it cannot sample prompts: give --prompts")
    torch.manual_seed(seed)
    found: dict[str, None] = {}
    for _ in range(0, 4 * number, batch_size):  # some are blank or repeated
        for ids in target.write([begin[:1]] * batch_size, OWN_PROMPT_LEN, temperature=1.0):
            text = target.tokenizer.decode(ids, skip_special_tokens=True)
            if text.strip():
                found[text] = None
        if len(found) >= number:
            break
    return prompts.encode_prompts(list(found)[:number], target.tokenizer)


def texts(encoded: Sequence[EncodedPrompt], store: TextStore) -> list[Text]:
    """All texts in order of prompts, without empty ones."""
    found = [Text(prompt.ids, store.outputs[number]) for number, prompt in enumerate(encoded)]
    return [text for text in found if text.output_ids]
