"""Messages stay small: the parts of an update are equivalent to the whole."""

from copy import deepcopy
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.shard.grpc.codec import write_update
from lorikeet.shard.grpc.streams import AdapterEvents, Details, Output, Status, StreamUpdate, TokenColumns
from lorikeet.shard.requests.request import FinishReason
from lorikeet.shard.scheduler.adapter_slots import Residency

SECONDS = ("draft_seconds", "verify_seconds", "accept_seconds")


def make_output(request_id: int, num_tokens: int, num_scores: int, width: int) -> Output:
    return Output(
        (1, request_id),
        token_ids=list(range(num_tokens)),
        sources=bytes(num_tokens),
        step_ends=b"\1" * num_tokens,
        logprobs=[-float(i) for i in range(num_tokens)],
        num_cached=3,
        num_drafted=(4, 0, 2),
        num_accepted=5,
        seconds=(0.25, 0.5, 0.125),
        finish_reason=FinishReason.LENGTH,
        details=Details(
            alternative_ids=list(range(width * num_tokens)),
            alternative_logprobs=[-float(i) for i in range(width * num_tokens)],
            prefill_logprobs=[-float(i) for i in range(num_scores)],
            prefill_alternative_ids=list(range(width * num_scores)),
            prefill_alternative_logprobs=[-float(i) for i in range(width * num_scores)],
            prefill_ranks=list(range(num_scores)),
        ),
    )


def test_a_large_update_is_split_and_complete() -> None:
    outputs = [make_output(1, 5000, 100_000, 5), make_output(2, 10, 0, 0), make_output(3, 40_000, 0, 20)]
    whole = {output.key[1]: output for output in outputs}
    adapters = AdapterEvents({"left": None}, {"left": (Residency.LOADING, ""), "broken": (Residency.FAILED, "no file")})
    status = Status(step=7, credit_requests=4)
    update = StreamUpdate(outputs, status, num_preempted=2, acknowledged=9, adapters=adapters)
    messages = list(write_update(update, pb.Heartbeat()))
    assert len(messages) > 3
    assert not any(message.HasField("step_requests") for message in messages)
    assert sum(message.load.num_preempted for message in messages) == 2
    assert [(state.digest, state.residency, state.reason) for message in messages for state in message.adapters] == [
        ("left", pb.AdapterState.ABSENT, ""),
        ("left", pb.AdapterState.LOADING, ""),
        ("broken", pb.AdapterState.FAILED, "no file"),
    ]
    seen: dict[int, list[pb.RequestOutput]] = {}
    for message in messages:
        assert message.ByteSize() < 4 << 20
        assert (message.step, message.credit.num_requests, message.credit.acknowledged) == (7, 4, 9)
        assert len({output.id for output in message.outputs}) == len(message.outputs)
        for part in message.outputs:
            seen.setdefault(part.id, []).append(part)
    for request_id, parts in seen.items():
        output = whole[request_id]
        assert output.details is not None
        for name in ("token_ids", "logprobs"):
            assert [value for part in parts for value in getattr(part, name)] == getattr(output, name)
        for field in fields(Details):
            assert [value for part in parts for value in getattr(part, field.name)] == getattr(
                output.details, field.name
            )
        assert b"".join(part.step_ends for part in parts) == output.step_ends
        assert sum(part.num_cached_tokens for part in parts) == 3
        assert [list(part.num_drafted) for part in parts] == [[4, 0, 2]] + [[]] * (len(parts) - 1)
        assert sum(part.num_accepted for part in parts) == 5
        assert [sum(getattr(part, name) for part in parts) for name in SECONDS] == [0.25, 0.5, 0.125]
        assert [part.finish_reason for part in parts] == [0] * (len(parts) - 1) + [pb.FINISH_LENGTH]
        for part in parts:
            assert len(part.alternative_ids) * len(output.token_ids) == len(part.token_ids) * len(
                output.details.alternative_ids
            )
    assert all(len(earlier.prefill_logprobs) >= len(later.prefill_logprobs) for earlier, later in pairwise(seen[1]))


@pytest.mark.parametrize("ids", [[], [4, 9]])
def test_step_requests_are_in_the_first_message_even_if_empty(ids: list[int]) -> None:
    outputs = [make_output(1, 100_000, 0, 5)]
    update = StreamUpdate(outputs, Status(), num_preempted=0, acknowledged=0, step_requests=ids)
    first, *others = write_update(update, pb.Heartbeat())
    assert first.HasField("step_requests") and list(first.step_requests.ids) == ids
    assert others and not any(message.HasField("step_requests") for message in others)


def columns(ids: list[int], num_alternatives: int = 0) -> TokenColumns:
    made = TokenColumns(1, np.array(ids, np.uint64), np.arange(len(ids)))
    if num_alternatives:
        made.logprobs = -np.arange(len(ids), dtype=np.float32)
        made.alternative_ids = np.arange(len(ids) * num_alternatives).reshape(-1, num_alternatives)
        made.alternative_logprobs = -made.alternative_ids.astype(np.float32)
    return made


def test_columns_come_before_the_outputs_of_a_message_and_steps_stay_in_order() -> None:
    """What a request gets is the same in columns and in outputs, for a router that reads only the latter."""
    steps = [make_output(7, 1, 0, 0), columns([7, 8], 2), columns([7]), make_output(8, 2, 0, 0), columns([7, 9])]

    def update() -> StreamUpdate:
        return StreamUpdate(deepcopy(steps))

    messages = list(write_update(update(), pb.Heartbeat(), takes_columns=True))
    assert [
        ([list(part.ids) for part in message.columns], [part.id for part in message.outputs]) for message in messages
    ] == [
        ([], [7]),
        ([[7, 8], [7]], [8]),
        ([[7, 9]], []),
    ]
    scored = messages[1].columns[0]
    assert (list(scored.token_ids), list(scored.logprobs)) == ([0, 1], [0.0, -1.0])
    assert list(scored.alternative_ids) == [0, 1, 2, 3] == [-value for value in scored.alternative_logprobs]
    [message] = write_update(update(), pb.Heartbeat())
    assert not message.columns
    by_id = {part.id: part for part in message.outputs}
    assert {key: list(part.token_ids) for key, part in by_id.items()} == {7: [0, 0, 0, 0], 8: [1, 0, 1], 9: [1]}
    assert by_id[7].sources == b"\0\1\1\1" and by_id[7].step_ends == b"\1" * 4
    assert list(by_id[8].alternative_ids) == [2, 3] and list(by_id[8].logprobs) == [-1.0, 0.0, -1.0]


def test_many_columns_are_split() -> None:
    update = StreamUpdate([columns(list(range(4096)), 20) for _ in range(5)])
    messages = list(write_update(update, pb.Heartbeat(), takes_columns=True))
    assert len(messages) > 1 and sum(len(message.columns) for message in messages) == 5
    assert all(message.ByteSize() < 4 << 20 for message in messages)
