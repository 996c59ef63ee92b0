"""The rows of one job, as they lie in the shard's memory, which goes on to change: a block that it has taken for other
rows since the job was sent is left out.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorikeet.adapters.medusa.texts import NOTHING, labels_of
from lorikeet.proto.learning import BLOCK_ROWS, RowArrays, TrainingJob, row_indices

HELD_OUT_SHARE, MAX_HELD_OUT = 0.1, 2048
"""The newest rows that are not trained on: this share, at most so many."""
CANDIDATE_SHARE, MAX_CANDIDATES = 0.99, 8192
"""The most frequent labels that make up this share of all, at most so many, are the candidates."""


@dataclass(frozen=True)
class HeldOut:
    """The newest texts."""

    # [rows, H] bfloat16
    rows: Tensor
    output_ids: list[list[int]]
    """Output token ids of each text, in the order of the rows."""


class JobRows:
    """The rows of a job, text after text."""

    def __init__(self, arrays: RowArrays, job: TrainingJob, num_heads: int) -> None:
        self._arrays = arrays
        self._versions = {block.number: block.version for block in job.blocks}
        indices = row_indices(job.blocks)
        texts, token_ids = arrays.texts[indices], arrays.token_ids[indices].astype(np.int64)
        is_current = self._is_current(indices)
        indices, texts, token_ids = indices[is_current], texts[is_current], token_ids[is_current]
        newest = _newest(texts, min(int(HELD_OUT_SHARE * len(texts)), MAX_HELD_OUT))
        self.held_out = self._held_out(indices, texts, token_ids, newest)
        ages = np.arange(len(texts), 0, -1)  # 1 for the newest row
        training = np.flatnonzero(~np.isin(texts, newest))
        order = training[np.argsort(texts[training], kind="stable")]
        # [n] index of each row, and whether it was not trained on before; so many were held out last time
        self.indices, self._is_new = indices[order], ages[order] <= job.num_new + self.num_held_out
        # [n, heads]
        remaining = torch.from_numpy(_remaining(texts[order]))
        # [C], [n, heads] index of each label among these candidates
        self.candidates, self.labels = _candidates(labels_of(torch.from_numpy(token_ids[order]), remaining, num_heads))

    @property
    def num_held_out(self) -> int:
        return len(self.held_out.rows)

    def batches(self, size: int, random: np.random.Generator) -> list[npt.NDArray[np.int64]]:
        """One pass over the new rows, in a random order, with as many others."""
        new, old = np.flatnonzero(self._is_new), np.flatnonzero(~self._is_new)
        drawn = random.choice(old, min(len(new), len(old)), replace=False)
        chosen = random.permutation(np.concatenate([new, drawn]))
        return [chosen[first : first + size] for first in range(0, len(chosen), size)]

    def take(self, batch: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """[S, H] rows and [S, heads] labels; nothing is to be learned from rows that have gone."""
        indices = self.indices[batch]
        rows = _as_bfloat16(self._arrays.hidden[indices])
        labels = self.labels[torch.from_numpy(batch)]
        labels[torch.from_numpy(~self._is_current(indices))] = NOTHING
        return rows, labels

    def _is_current(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Read this after the rows themselves."""
        blocks = indices // BLOCK_ROWS
        used, inverse = np.unique(blocks, return_inverse=True)
        same = np.array([self._arrays.versions[block] == self._versions[block] for block in used.tolist()], bool)
        return same[inverse] if len(used) else np.empty(0, bool)

    def _held_out(
        self,
        indices: npt.NDArray[np.int64],
        texts: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
        newest: npt.NDArray[np.int64],
    ) -> HeldOut:
        chosen = np.flatnonzero(np.isin(texts, newest))
        chosen = chosen[np.argsort(texts[chosen], kind="stable")]
        rows = _as_bfloat16(self._arrays.hidden[indices[chosen]])
        is_current = self._is_current(indices[chosen])
        rows, chosen = rows[torch.from_numpy(is_current)], chosen[is_current]
        starts = np.flatnonzero(np.diff(texts[chosen])) + 1
        return HeldOut(rows, [part.tolist() for part in np.split(token_ids[chosen], starts)] if len(chosen) else [])


def _newest(texts: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """The texts whose last rows are the newest, as many as have `num_rows` rows."""
    numbers, first_from_end, counts = np.unique(texts[::-1], return_index=True, return_counts=True)
    order = np.argsort(first_from_end)
    num_taken = int(np.searchsorted(np.cumsum(counts[order]), num_rows)) + 1
    return numbers[order[: min(num_taken, len(order) - 1)]]


def _remaining(texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """texts: [n], rows of one text together. Returns [n] rows of the same text after each."""
    ends = np.append(np.flatnonzero(np.diff(texts)), len(texts) - 1)
    return np.repeat(ends, np.diff(np.append(-1, ends))) - np.arange(len(texts)) if len(texts) else texts


def _candidates(labels: Tensor) -> tuple[Tensor, Tensor]:
    """labels: [n, heads]. Returns [C] token ids, the most frequent first, and [n, heads] indices into them; nothing is
    learned from a rarer label. Most of a step's time is the product with the output head, and texts of one pair use a
    small part of a large vocabulary (a softmax over candidates: Jean et al. 2015, arXiv 1412.2007).
    """
    is_label = labels != NOTHING
    if not is_label.any():
        return torch.empty(0, dtype=torch.long), labels
    token_ids, inverse, counts = labels[is_label].unique(return_inverse=True, return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    counts_before = counts[order].cumsum(0) - counts[order]
    num_candidates = min(int((counts_before < CANDIDATE_SHARE * counts.sum()).sum()), MAX_CANDIDATES)
    places = torch.full_like(token_ids, NOTHING)
    places[order[:num_candidates]] = torch.arange(num_candidates)
    places_of_labels = labels.clone()
    places_of_labels[is_label] = places[inverse]
    return token_ids[order[:num_candidates]], places_of_labels


def _as_bfloat16(bits: npt.NDArray[np.uint16]) -> Tensor:
    """bits: [S, H], a copy."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
