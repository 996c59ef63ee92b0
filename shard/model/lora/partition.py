"""A rank's part of one matrix under tensor parallelism (Shoeybi et al. 2019): some of its rows or columns."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Partition:
    """Partition of a linear module `y = x Wᵀ + b`, W: [out, in]."""

    rank: int
    num_ranks: int
    num_out: int
    """Outputs of the whole module, over all ranks."""
    num_in: int
    """Inputs of the whole module, over all ranks."""
    is_row_parallel: bool
    """Whether ranks hold columns of W, and the sum of their results is the module's; else they hold rows."""
    is_gathered: bool = False
    """Whether every rank needs the whole output, not only its part."""
    is_split: bool = False
    """Whether the input is whole, and each rank takes its part of it."""
    num_stacked: int = 1
    """Matrices that are stacked in W; a rank holds its part of the rows of each."""

    def __post_init__(self) -> None:
        if (self.num_in if self.is_row_parallel else self.num_out) % (self.num_stacked * self.num_ranks):
            shape = [self.num_out, self.num_in]
            raise ValueError(f"a matrix of shape {shape} does not divide by {self.num_ranks} ranks")

    @property
    def is_connected(self) -> bool:
        """Whether ranks exchange something at this module."""
        return self.is_row_parallel or self.is_gathered or self.is_split

    @property
    def columns(self) -> slice:
        """Held by this rank, if row-parallel."""
        count = self.num_in // self.num_ranks
        return slice(self.rank * count, (self.rank + 1) * count)

    @property
    def rows(self) -> tuple[slice, ...]:
        """Held by this rank, if not row-parallel; one range per stacked matrix."""
        each = self.num_out // self.num_stacked
        count = each // self.num_ranks
        firsts = (number * each + self.rank * count for number in range(self.num_stacked))
        return tuple(slice(first, first + count) for first in firsts)

    def of_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: [..., out, in]. Returns this rank's part, a view if contiguous."""
        if self.is_row_parallel:
            return weight[..., self.columns]
        parts = [weight[..., rows, :] for rows in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def of_bias(self, bias: torch.Tensor) -> torch.Tensor | None:
        """bias: [..., out]. Returns this rank's part; None where another rank adds it."""
        if self.is_row_parallel:
            return bias if self.rank == 0 else None
        return torch.cat([bias[..., rows] for rows in self.rows], dim=-1)
