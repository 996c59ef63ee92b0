"""The ranks of one shard as the network meets them: sums and gathered outputs, in the order of the ranks.

On CPU a row's bits do not depend on the rows beside it: two ranks' results are added one way only, those of more are
added in the order of the ranks, which torch's own sum does not promise. Knows torch.distributed and no model.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import structlog
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lorikeet.shard.system.process import end_process

log = structlog.get_logger()

RANK_EXIT = 4
"""The exit code of a shard whose ranks are not together any more."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Group:
    """All ranks. Everything here is to be called by each of them, in the same order."""

    def __init__(self, rank: int, size: int, store: TCPStore, device: torch.device, timeout_s: float) -> None:
        """Raises RuntimeError where the others are not there in time."""
        self.rank, self.size = rank, size
        self._is_cpu = device.type == "cpu"
        timeout = timedelta(seconds=timeout_s)
        distributed.init_process_group(
            "gloo" if self._is_cpu else "nccl", store=store, rank=rank, world_size=size, timeout=timeout,
            device_id=None if self._is_cpu else device,
        )  # fmt: skip
        self._readers = distributed.new_group(backend="gloo", timeout=timeout)

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """y: [..., n] of each rank. Returns their sum, in y."""
        if self._is_cpu and self.size > 2:
            first, *others = self._all(y, None)
            y.copy_(first)
            for other in others:
                y += other
            return y
        distributed.all_reduce(y)
        return y

    def gather(self, y: torch.Tensor) -> torch.Tensor:
        """y: [..., n] of each rank. Returns [..., n * ranks]."""
        return torch.cat(self._all(y.contiguous(), None), dim=-1)

    def broadcast(self, values: torch.Tensor) -> None:
        """values: as the first rank has them, from now on everywhere."""
        distributed.broadcast(values, 0)

    # For the threads that read adapters, beside the steps

    def agree(self, reason: str) -> str:
        """What keeps any rank from going on, its own `reason` or another's; empty if nothing does."""
        reasons: list[str] = [""] * self.size
        with self._to_the_end():
            distributed.all_gather_object(reasons, reason, self._readers)
        return next(filter(None, reasons), "")

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """values: [n] in host memory. Returns the sum over all ranks, in their order."""
        with self._to_the_end():
            first, *others = self._all(values, self._readers)
        for other in others:
            first += other
        return first

    @contextmanager
    def _to_the_end(self) -> Iterator[None]:
        """Ranks that miss each other here would misunderstand all that follows: the process ends."""
        try:
            yield
        except Exception:
            log.exception("the ranks of this shard have lost each other")
            end_process(RANK_EXIT)

    def _all(self, y: torch.Tensor, group: distributed.ProcessGroup | None) -> list[torch.Tensor]:
        parts = [torch.empty_like(y) for _ in range(self.size)]
        distributed.all_gather(parts, y, group=group)
        return parts


def prefer_loopback(host: str) -> None:
    """Let the ranks of one machine talk over its loopback, whatever its name stands for. Before any Group."""
    if host in LOOPBACK and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
