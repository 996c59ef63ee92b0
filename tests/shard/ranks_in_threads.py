"""Ranks as threads of one process: the collectives of torch.distributed, in the order of the ranks."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import torch

from lorikeet.shard.model.tensor_parallel.group import Group

WAIT_S = 120.0
T = TypeVar("T")


class Meeting:
    """Exchanges values between the threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=WAIT_S)
        self._left: list[Any] = [None] * size

    def all(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks."""
        self._left[rank] = value
        self._barrier.wait()
        found = list(self._left)
        self._barrier.wait()
        return found

    def abandon(self) -> None:
        self._barrier.abort()


class ThreadGroup:
    """A Group for one of the threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        first, *others = self._meeting.all(self.rank, y.clone())
        return y.copy_(sum(others, first))

    def gather(self, y: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meeting.all(self.rank, y), dim=-1)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        return self.sum(values)

    def agree(self, reason: str) -> str:
        return next(filter(None, self._meeting.all(self.rank, reason)), "")


def together(work: Sequence[Callable[[Group], T]]) -> list[T]:
    """Run all ranks at the same time. Returns their results."""
    meeting = Meeting(len(work))

    def run(rank: int) -> T:
        try:
            return work[rank](cast(Group, ThreadGroup(meeting, rank)))
        except BaseException:
            meeting.abandon()
            raise

    with ThreadPoolExecutor(len(work)) as pool:
        made = [pool.submit(run, rank) for rank in range(len(work))]
        problems = [error for each in made if (error := each.exception()) is not None]
        if problems:  # a broken barrier is the consequence of another rank's error
            raise next((each for each in problems if not isinstance(each, threading.BrokenBarrierError)), problems[0])
        return [each.result() for each in made]
