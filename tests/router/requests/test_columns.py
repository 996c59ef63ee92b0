"""Columns of a step with drafts: the router reads from them what it reads from an output of each request."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.requests.request import drafted_outputs
from lorikeet.shard.grpc.codec import write_columns, write_output
from lorikeet.shard.grpc.streams import ColumnDrafts, TokenColumns
from lorikeet.shard.requests.request import Source

OWN = Source.TARGET, Source.BONUS, Source.RESAMPLE
LOOKUP, MEDUSA, TARGET, BONUS, RESAMPLE = map(int, (Source.LOOKUP, Source.MEDUSA, *OWN))


def columns(has_logprobs: bool = False) -> TokenColumns:
    """Three requests: two accepted drafts of two, none of three by heads, and one without drafts."""
    sources = np.array([LOOKUP, LOOKUP, BONUS, RESAMPLE, TARGET], np.uint8)
    numbers = np.array([3, 1, 1]), sources, np.array([2, 3, 0]), np.array([2, 0, 0])
    drafts = ColumnDrafts(*numbers, np.array([LOOKUP, MEDUSA, LOOKUP], np.uint8), seconds=(0.25, 0.5, 0.125))
    made = TokenColumns(1, np.array([4, 7, 9], np.uint64), np.array([10, 11, 12, 13, 14]), drafts=drafts)
    if has_logprobs:
        made.logprobs = np.array([-1, -2, -3, -4, -5], np.float32)
        made.alternative_ids = np.arange(10).reshape(5, 2)
        made.alternative_logprobs = -np.arange(10, dtype=np.float32).reshape(5, 2)
    return made


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_each_request_gets_what_an_output_would_say(has_logprobs: bool) -> None:
    message = pb.TokenColumns()
    write_columns(columns(has_logprobs), message)
    first, second, third = drafted_outputs(message)
    assert [first, second, third] == [write_output(output) for output in columns(has_logprobs).outputs()]
    assert list(first.token_ids) == [10, 11, 12] and first.step_ends == b"\0\0\1" and first.num_accepted == 2
    assert list(first.num_drafted) == [2, 0, 0, 0, 0] and list(second.num_drafted) == [0, 3, 0, 0, 0]
    assert not third.num_drafted and third.sources == bytes([TARGET])
    assert list(second.alternative_ids) == ([6, 7] if has_logprobs else [])


CHANGES: list[dict[str, Any]] = [
    {"ids": [1]}, {"token_ids": [1]}, {"num_tokens": [1]}, {"num_drafted": [1]}, {"num_accepted": [1]},
    {"logprobs": [0.5]}, {"alternative_ids": [1]}, {"seconds": [1.0]}, {"draft_sources": b"\0"},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_columns_of_unequal_lengths_are_refused(change: dict[str, Any]) -> None:
    message = pb.TokenColumns()
    write_columns(columns(), message)
    changed = deepcopy(message)
    for name, values in change.items():
        setattr(changed, name, values) if isinstance(values, bytes) else getattr(changed, name).extend(values)
    with pytest.raises(ValueError, match="columns differ in length"):
        list(drafted_outputs(changed))
