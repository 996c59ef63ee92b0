"""What ranks tell each other before they serve."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.ranks.commands import EndMemory
from lorikeet.shard.ranks.leader import Leader
from lorikeet.shard.startup.rank_worker import RankWorker
from tests.forked import Started
from tests.shard.ranks_in_threads import Meeting, together


def test_every_rank_refuses_pages_of_different_sizes() -> None:
    """Such as of devices of which only one runs FlashAttention 3: page ids would mean different tokens."""
    meeting = Meeting(3)

    def problem(rank: int, page_size: int) -> str:
        group = cast(Group, SimpleNamespace(least=lambda value: min(meeting.all(rank, value))))
        try:
            Group.check_page_size(group, page_size)
        except ValueError as error:
            return str(error)
        return ""

    def problems(*sizes: int) -> list[str]:
        return together([lambda _, rank=rank, size=size: problem(rank, size) for rank, size in enumerate(sizes)])

    assert problems(64, 64, 64) == ["", "", ""]
    actual = problems(64, 256, 64)
    assert len(set(actual)) == 1 and "of 64 tokens on one rank and of 256 on another" in actual[0]


def test_the_first_rank_allocates_what_the_rank_with_the_least_memory_has() -> None:
    """Each rank has other processes next to it; page ids are the same on all."""
    meeting = Meeting(3)

    class Shared:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def least(self, value: int) -> int:
            return int(min(meeting.all(self._rank, value)))

    def of_leader(_: Group) -> int:
        leader = cast(Leader, SimpleNamespace(send=lambda command: None, group=Shared(0)))
        return Leader.least_memory(leader, 900, spare=5)

    def of_worker(rank: int, num_bytes: int) -> int:
        asked: list[int] = []
        memory = SimpleNamespace(room=lambda config, spare: asked.append(spare) or num_bytes)
        worker = cast(RankWorker, SimpleNamespace(_group=Shared(rank), _memory=memory, _config=None))
        RankWorker.execute(worker, EndMemory(spare=5))
        return asked[0]

    first, *spares = together([of_leader, lambda _: of_worker(1, 700), lambda _: of_worker(2, 800)])
    assert (first, spares) == (700, [5, 5])


def test_ranks_wait_for_each_other_longer_while_they_load_than_while_they_serve(tmp_path: Path) -> None:
    """Two processes over gloo: the second one is late twice."""
    with late(tmp_path / "first", "0", "0") as first:
        while not (port := (tmp_path / "first").read_text().strip()):
            assert first.poll() is None
            time.sleep(0.01)
        with late(tmp_path / "second", "1", port):
            assert first.wait(60) == 0, (tmp_path / "first").read_text()
    assert (tmp_path / "first").read_text().split()[1:] == ["waited", "gave-up"]


@contextmanager
def late(output: Path, *arguments: str) -> Iterator[Started]:
    """A rank, of a number and with a port."""
    with output.open("wb") as file:
        module = "tests.shard.model.tensor_parallel.late_rank"
        rank = Started(module, *arguments, environment=os.environ, output=file.fileno())
    try:
        yield rank
    finally:
        if rank.poll() is None:
            rank.send_signal(signal.SIGKILL)
            rank.wait(60)
