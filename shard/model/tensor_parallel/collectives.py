"""Sums and gathered outputs of ranks as custom operators of torch, so that captured forward passes contain them."""

from weakref import WeakValueDictionary

import torch

from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.system.operators import operator

_groups: "WeakValueDictionary[int, Group]" = WeakValueDictionary()


class Collectives:
    """The operators for one group of ranks, to which it holds a reference."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        _groups[id(ranks)] = ranks

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """y: [..., n] of each rank. Returns their sum, in y."""
        sum_over_ranks(y, id(self._ranks))
        return y

    def gather(self, y: torch.Tensor) -> torch.Tensor:
        """y: [..., n] of each rank. Returns [..., n * ranks]."""
        whole: torch.Tensor = gather_from_ranks(y, id(self._ranks))
        return whole


@operator("sum_over_ranks", mutates_args=("y",))
def sum_over_ranks(y: torch.Tensor, ranks: int) -> None:
    """y: [..., n] of each rank, becomes their sum."""
    _groups[ranks].sum(y)


@operator("gather_from_ranks", mutates_args=())
def gather_from_ranks(y: torch.Tensor, ranks: int) -> torch.Tensor:
    """y: [..., n] of each rank. Returns [..., n * ranks]."""
    return _groups[ranks].gather(y)


@sum_over_ranks.register_fake
def _(*_args: object) -> None:
    return None


@gather_from_ranks.register_fake
def _(y: torch.Tensor, ranks: int) -> torch.Tensor:
    return y.new_empty(*y.shape[:-1], y.shape[-1] * _groups[ranks].size)
