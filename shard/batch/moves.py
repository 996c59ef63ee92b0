"""Moves segments of a step on the device: they begin later by the number of drafts that the step before accepted."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.batch.transfer import to_device

Indices = npt.NDArray[np.int64]


class Move(NamedTuple):
    """Numbers that change with the accepted drafts of a row of device state."""

    # on the device, changed in place
    numbers: torch.Tensor
    places: Indices
    """[n] which numbers."""
    rows: Indices
    """[n] the row of each."""
    choices: Indices | None = None
    """[n, most + 1] the number by accepted drafts; None where they are added to it."""


class Moves:
    """Those of one step at a time."""

    def __init__(self) -> None:
        self._moves: list[Move] = []

    def clear(self) -> None:
        """Begin a step."""
        self._moves = []

    def add(self, move: Move) -> None:
        """Move these numbers too."""
        self._moves.append(move)

    def apply(self, num_accepted: torch.Tensor | None) -> None:
        """Change all numbers, in order with the next launches. num_accepted: [rows of device state] int64."""
        if not self._moves:
            return
        assert num_accepted is not None
        tables = [_table(move) for move in self._moves]
        packed = np.concatenate([table.ravel() for table in tables])
        sent = to_device(torch.from_numpy(packed), num_accepted.device).split([table.size for table in tables])
        for move, table, flat in zip(self._moves, tables, sent, strict=True):
            places, rows, *choices = flat.view(table.shape)
            accepted = num_accepted.index_select(0, rows)
            if choices:
                found = flat.view(table.shape)[2:].gather(0, accepted[None])[0]
                move.numbers.index_copy_(0, places, found.to(move.numbers.dtype))
            else:
                move.numbers.index_add_(0, places, accepted.to(move.numbers.dtype))


def _table(move: Move) -> Indices:
    """[2 + choices, n] places, rows and choices."""
    columns = [move.places, move.rows, *(() if move.choices is None else move.choices.T)]
    return np.stack(columns).astype(np.int64)
