"""Hidden states of generated texts: computed once per text by the target and stored in files of bounded size.

Any number of heads can be trained on the same files.
"""

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorikeet.adapters.medusa.target import Target
from lorikeet.adapters.medusa.texts import Text

SHARD_BYTES = 256 * 2**20
MAX_BATCH_TOKENS = 8192
"""Maximum tokens of one forward pass, including padding."""
NOTHING = -100
"""The label for a position after the end of the text."""


@dataclass(frozen=True)
class Shard:
    """Rows of some texts, one per generated token: the hidden state that the output head turned into that token."""

    rows: Tensor
    """[rows, H], bfloat16."""
    output_ids: Tensor
    """[rows]: the generated token of each row."""
    remaining: Tensor
    """[rows]: generated tokens of the same text after this one."""

    def labels(self, num_heads: int) -> Tensor:
        """[rows, heads]: the token that head h must predict, h + 1 positions after the row's own."""
        return labels_of(self.output_ids, self.remaining, num_heads)


def labels_of(output_ids: Tensor, remaining: Tensor, num_heads: int) -> Tensor:
    """output_ids, remaining: [rows]. Returns [rows, heads]: the token h + 1 positions after the row's own."""
    columns = []
    for ahead in range(1, num_heads + 1):
        shifted = torch.cat([output_ids[ahead:], output_ids[:ahead]])
        columns.append(torch.where(remaining >= ahead, shifted, NOTHING))
    return torch.stack(columns, dim=1)


class HiddenFiles:
    """The shards of one run."""

    def __init__(self, folder: Path, texts: Sequence[Text], hidden_size: int, seed: int) -> None:
        """The seed shuffles the texts, so that each shard is a fair sample of all."""
        self._folder = folder
        self._parts = deal(texts, max(1, SHARD_BYTES // (2 * hidden_size)), seed)
        self.num_rows = [sum(len(text.output_ids) for text in part) for part in self._parts]
        """Per shard."""

    def compute(self, target: Target, settings: dict[str, Any], progress: Callable[[int, int], None]) -> None:
        """Compute the missing shards; those of other settings are deleted first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        note, head = self._folder / "settings.json", json.dumps(settings, sort_keys=True)
        if not note.exists() or note.read_text() != head:
            for path in self._folder.glob("rows-*.safetensors"):
                path.unlink()
            note.write_text(head)
        done, total = 0, sum(self.num_rows)
        for number, part in enumerate(self._parts):
            num_before = done
            if not self._path(number).exists():
                self._write(number, part, target, lambda more: progress(num_before + more, total))  # noqa: B023 (called at once)
            done += self.num_rows[number]
            progress(done, total)

    def load(self, number: int, device: torch.device) -> Shard:
        tensors = load_file(self._path(number), device=str(device))
        return Shard(tensors["rows"], tensors["output_ids"].long(), tensors["remaining"])

    def _write(self, number: int, part: Sequence[Text], target: Target, progress: Callable[[int], None]) -> None:
        """The file appears complete or not at all."""
        offsets = [0]
        for text in part:
            offsets.append(offsets[-1] + len(text.output_ids))
        rows = torch.empty(offsets[-1], target.hidden_size, dtype=torch.bfloat16)
        done = 0
        for batch in batches(part):
            for index, hidden in zip(batch, written_rows(target, [part[i] for i in batch]), strict=True):
                rows[offsets[index] : offsets[index + 1]] = hidden.to("cpu", torch.bfloat16)
                done += len(hidden)
            progress(done)
        tensors = {
            "rows": rows,
            "output_ids": torch.tensor([token for text in part for token in text.output_ids], dtype=torch.int32),
            "remaining": torch.cat([torch.arange(len(t.output_ids) - 1, -1, -1, dtype=torch.int32) for t in part]),
        }
        scratch = self._path(number).with_suffix(".part")
        save_file(tensors, scratch)
        os.replace(scratch, self._path(number))

    def _path(self, number: int) -> Path:
        return self._folder / f"rows-{number:05d}.safetensors"


def deal(texts: Sequence[Text], rows_per_shard: int, seed: int) -> list[list[Text]]:
    """Texts in an order given by the seed, split where a shard is full."""
    order = random.Random(f"{seed} shards").sample(list(texts), len(texts))
    parts: list[list[Text]] = [[]]
    room = rows_per_shard
    for text in order:
        if room < len(text.output_ids) and parts[-1]:
            parts.append([])
            room = rows_per_shard
        parts[-1].append(text)
        room -= len(text.output_ids)
    return parts


def batches(texts: Sequence[Text]) -> Iterator[list[int]]:
    """Indices of texts of similar length that form one forward pass."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].prompt_ids) + len(texts[i].output_ids))
    batch: list[int] = []
    for index in order:
        length = len(texts[index].prompt_ids) + len(texts[index].output_ids)
        if batch and length * (len(batch) + 1) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def written_rows(target: Target, texts: Sequence[Text]) -> Iterator[Tensor]:
    """Per text the rows that its generated tokens came from, [generated tokens, H]."""
    sequences = [(*text.prompt_ids, *text.output_ids) for text in texts]
    for rows, text in zip(target.rows(sequences), texts, strict=True):
        yield rows[len(text.prompt_ids) - 1 : -1]
