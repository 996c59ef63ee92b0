"""The ranks of one shard: sums and gathered outputs, in the order of the ranks, over torch.distributed.

On CPU a row's bits do not depend on other rows: the results of more than two ranks are added in the order of the ranks,
which torch's all_reduce does not guarantee.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import structlog
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from lorikeet.shard.model.tensor_parallel.symmetric_memory import OneShotAllReduce
from lorikeet.shard.system.process import end_process

log = structlog.get_logger()

RANK_EXIT = 4
"""The exit code of a shard whose ranks have lost each other."""
LOADING_S = 3600.0
"""Time that a rank waits for others that still load: a cold network file system takes many minutes."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Group:
    """All ranks. Each of them must call the same methods in the same order."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: TCPStore,
        device: torch.device,
        timeout_s: float,
        has_symmetric_memory: bool = False,
    ) -> None:
        """Raises RuntimeError where the other ranks do not connect within `timeout_s`, and ValueError where symmetric
        memory is asked for and not supported. From then on the ranks wait for each other for LOADING_S, until `serve`.
        """
        self.rank, self.size = rank, size
        self._is_cpu = device.type == "cpu"
        store.set(f"met {rank}", "")
        store.wait([f"met {other}" for other in range(size)], timedelta(seconds=timeout_s))
        timeout = timedelta(seconds=LOADING_S)
        distributed.init_process_group(
            "gloo" if self._is_cpu else "nccl", store=store, rank=rank, world_size=size, timeout=timeout,
            device_id=None if self._is_cpu else device,
        )  # fmt: skip
        self._readers = distributed.new_group(backend="gloo", timeout=timeout)
        self._one_shot = OneShotAllReduce(device, size) if has_symmetric_memory else None

    def serve(self, timeout_s: float) -> None:
        """The model is loaded: from now on a rank that waits longer for another one gives up."""
        for group in (None, self._readers):
            _set_pg_timeout(timedelta(seconds=timeout_s), group)

    def least(self, value: int) -> int:
        """The smallest `value` of all ranks. Not while adapters are read."""
        values: list[int] = [0] * self.size
        distributed.all_gather_object(values, value, self._readers)
        return min(values)

    def check_page_size(self, page_size: int) -> None:
        """Raises ValueError on every rank if their attention takes KV pages of different sizes, in tokens."""
        smallest, largest = self.least(page_size), -self.least(-page_size)
        if smallest != largest:
            raise ValueError(
                f"attention takes KV pages of {smallest} tokens on one rank and of {largest} on another: use devices "
                "of one kind, with the same packages"
            )

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """y: [..., n] of each rank. Returns their sum, in y."""
        if self._is_cpu and self.size > 2:
            first, *others = self._all(y, None)
            y.copy_(first)
            for other in others:
                y += other
            return y
        if self._one_shot is not None and self._one_shot.takes(y):
            return self._one_shot.sum(y)
        distributed.all_reduce(y)
        return y

    def gather(self, y: torch.Tensor) -> torch.Tensor:
        """y: [..., n] of each rank. Returns [..., n * ranks]."""
        return torch.cat(self._all(y.contiguous(), None), dim=-1)

    def broadcast(self, values: torch.Tensor) -> None:
        """Copy the first rank's values to every rank."""
        distributed.broadcast(values, 0)

    # For the threads that read adapters while steps run

    def agree(self, reason: str) -> str:
        """The first non-empty `reason` of any rank; empty if there is none."""
        reasons: list[str] = [""] * self.size
        with self._exit_on_error():
            distributed.all_gather_object(reasons, reason, self._readers)
        return next(filter(None, reasons), "")

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """values: [n] in host memory. Returns the sum over all ranks, in their order."""
        with self._exit_on_error():
            first, *others = self._all(values, self._readers)
        for other in others:
            first += other
        return first

    @contextmanager
    def _exit_on_error(self) -> Iterator[None]:
        """End the process on an error: ranks that disagree here would misread all later messages."""
        try:
            yield
        except Exception:
            log.exception("ranks_lost_each_other")
            end_process(RANK_EXIT)

    def _all(self, y: torch.Tensor, group: distributed.ProcessGroup | None) -> list[torch.Tensor]:
        parts = [torch.empty_like(y) for _ in range(self.size)]
        distributed.all_gather(parts, y, group=group)
        return parts


def prefer_loopback(host: str) -> None:
    """Connect the ranks of one machine over its loopback interface. Call before making any Group."""
    if host in LOOPBACK and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
