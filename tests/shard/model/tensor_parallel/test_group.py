"""What ranks tell each other before they serve."""

from types import SimpleNamespace
from typing import cast

from lorikeet.shard.model.tensor_parallel.group import Group
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
