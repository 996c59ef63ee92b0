"""The base's next-token distributions at every position of the training text, stored in a file.

A distribution over 4096 tokens is stored as a sketch: its most likely tokens and a few tokens sampled from the rest, so
that the mean of any function under the distribution has an unbiased estimate.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from lorikeet.demo.data.mixture import Tokens

Numbers = np.memmap[Any, np.dtype[Any]]

NUM_LIKELIEST, NUM_DRAWN = 48, 16
"""Tokens of a sketch. On average the 48 most likely tokens hold 0.92 of the base's probability."""
ROW_LEN = 1024
ROWS_PER_FORWARD = 4
POSITIONS_AT_ONCE = 128
"""Positions whose distributions fit in a cache."""
CHUNK_ROWS = 64
"""Rows that are written before the file marks them as done."""


@dataclass(frozen=True)
class Sketch:
    """The base's distributions at N positions, with K = NUM_LIKELIEST + NUM_DRAWN tokens of each."""

    # [N, K] the most likely tokens in order, then those sampled from the rest
    token_ids: Tensor
    # [N, K] the base's probability of each
    probabilities: Tensor

    def weights(self) -> Tensor:
        """[N, K]: the sum over k of weight[n, k] · f(token_ids[n, k]) estimates the mean of f."""
        likeliest = self.probabilities[:, :NUM_LIKELIEST]
        rest = (1 - likeliest.sum(-1, keepdim=True)).clamp(min=0) / NUM_DRAWN
        return torch.cat([likeliest, rest.expand(-1, NUM_DRAWN)], dim=1)


def sketch(logits: Tensor, generator: torch.Generator) -> Sketch:
    """logits are [N, V]."""
    probs = logits.float().softmax(-1)
    likeliest, ids = probs.topk(NUM_LIKELIEST)
    sums = probs.scatter(1, ids, 0.0).cumsum(-1)
    points = torch.rand(len(probs), NUM_DRAWN, generator=generator).to(probs.device) * sums[:, -1:]
    drawn = torch.searchsorted(sums, points).clamp(max=probs.shape[1] - 1)
    return Sketch(torch.cat([ids, drawn], 1), torch.cat([likeliest, probs.gather(1, drawn)], 1))


class SketchFile:
    """Rows of tokens and the sketch at each of their positions, in a folder, written in order and resumable."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.num_rows = num_rows
        self._done_path = folder / "rows-done"
        shape = (num_rows, ROW_LEN, NUM_LIKELIEST + NUM_DRAWN)
        self._token_ids = _open(folder / "token-ids.npy", np.dtype(np.uint16), shape)
        self._probabilities = _open(folder / "probabilities.npy", np.dtype(np.float16), shape)

    @property
    def rows_done(self) -> int:
        return int(self._done_path.read_text()) if self._done_path.exists() else 0

    def fill(self, base: LlamaForCausalLM, rows: Tokens, seed: int) -> Iterator[int]:
        """Compute the missing sketches of rows [R, ROW_LEN]; yields the number of finished rows after each chunk."""
        for start in range(self.rows_done, self.num_rows, CHUNK_ROWS):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + start)
            stop = min(start + CHUNK_ROWS, self.num_rows)
            for first in range(start, stop, ROWS_PER_FORWARD):
                last = min(first + ROWS_PER_FORWARD, stop)
                self._write(first, last, _compute(base, rows[first:last], generator))
            self._token_ids.flush()
            self._probabilities.flush()
            scratch = self._done_path.with_suffix(".part")
            scratch.write_text(str(stop))
            os.replace(scratch, self._done_path)
            yield stop

    def _write(self, first: int, last: int, answer: Sketch) -> None:
        shape = (last - first, ROW_LEN, -1)
        self._token_ids[first:last] = answer.token_ids.cpu().numpy().reshape(shape)
        self._probabilities[first:last] = answer.probabilities.cpu().numpy().reshape(shape)

    def read(self, spans: list[tuple[int, int, int]], device: torch.device) -> Sketch:
        """The sketches at positions start … stop of row r, for each (r, start, stop)."""
        ids = np.concatenate([self._token_ids[row, start:stop] for row, start, stop in spans])
        probabilities = np.concatenate([self._probabilities[row, start:stop] for row, start, stop in spans])
        return Sketch(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            torch.from_numpy(probabilities.astype(np.float32)).to(device),
        )


@torch.inference_mode()
def _compute(base: LlamaForCausalLM, rows: Tokens, generator: torch.Generator) -> Sketch:
    token_ids = torch.from_numpy(rows.astype(np.int64)).to(base.device)
    logits = base(token_ids, use_cache=False).logits.flatten(0, 1)
    pieces = [sketch(piece, generator) for piece in logits.split(POSITIONS_AT_ONCE)]
    return Sketch(torch.cat([p.token_ids for p in pieces]), torch.cat([p.probabilities for p in pieces]))


def _open(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Numbers:
    if path.exists():
        array: Numbers = np.load(path, mmap_mode="r+")
        if array.shape == shape:
            return array
        raise ValueError(f"{path} belongs to another run: its shape is {array.shape}, expected {shape}")
    return np.lib.format.open_memmap(path, "w+", dtype, shape)
