"""The announcement of a step, and how long the step waits for it."""

import threading
import time

import numpy as np
import pytest

from lorikeet.shard.grpc import streams
from lorikeet.shard.grpc.streams import Details, Outbox, Output, Status, StreamTooSlow, TokenColumns


def opened(*epochs: int) -> tuple[Outbox, list[int]]:
    outbox, calls = Outbox(), list[int]()
    for epoch in epochs:
        outbox.open(epoch, wake=lambda epoch=epoch: calls.append(epoch))  # type: ignore[misc]
    return outbox, calls


def test_each_stream_gets_its_own_requests_once() -> None:
    outbox, calls = opened(1, 2, 3)
    outbox.announce_step([(1, 7), (2, 7), (1, 9)])
    assert calls == [1, 2, 3]
    assert [outbox.take(epoch).step_requests for epoch in (1, 2, 3)] == [[7, 9], [7], []]
    assert [outbox.take(epoch).step_requests for epoch in (1, 2, 3)] == [None, None, None]


def test_a_newer_announcement_replaces_an_older_one() -> None:
    outbox, calls = opened(1)
    outbox.announce_step([(1, 7)])
    outbox.announce_step([(1, 8)])
    assert (calls, outbox.take(1).step_requests) == ([1], [8])


def test_a_step_waits_until_every_stream_has_sent_it() -> None:
    outbox, _ = opened(1, 2)
    sent: list[int] = []

    def send() -> None:
        for epoch in (1, 2):
            update = outbox.take(epoch)
            time.sleep(0.05)
            sent.append(epoch)
            outbox.sent(epoch, update)

    sender = threading.Timer(0.02, send)
    sender.start()
    outbox.announce_step([(1, 7)], wait_s=20)
    assert sent == [1, 2]
    sender.join()


def test_an_update_taken_before_does_not_count_as_sent() -> None:
    outbox, _ = opened(1)
    outbox.announce_step([(1, 7)])
    update = outbox.take(1)
    outbox.announce_step([(1, 8)])
    outbox.sent(1, update)
    start = time.monotonic()
    outbox.announce_step([(1, 8)], wait_s=0.05)
    assert time.monotonic() - start >= 0.05


def test_outputs_that_are_not_taken_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNSENT_BYTES", 100_000)
    outbox, ended = Outbox(), list[int]()
    for epoch in (1, 2):
        outbox.open(epoch, lambda: None, lambda epoch=epoch: ended.append(epoch))  # type: ignore[misc]

    def columns(epoch: int) -> TokenColumns:
        return TokenColumns(epoch, np.arange(10, dtype=np.uint64), np.arange(10, dtype=np.int64))

    for count in range(1000):
        details = Details(alternative_ids=[1] * 20)
        outbox.publish([Output((1, 5), [count], details=details), columns(1), columns(2)], Status(), {})
        if ended:
            break
        outbox.take(2)
    assert ended == [1] and 10 < count < 100
    with pytest.raises(StreamTooSlow):
        outbox.take(1)
    outbox.publish([columns(1), columns(2)], Status(), {})
    assert len(outbox.take(2).outputs) == 2, "another stream loses nothing"
    outbox.close(1)


def test_a_stream_that_ends_is_not_waited_for() -> None:
    outbox, _ = opened(1)
    closer = threading.Timer(0.02, lambda: outbox.close(1))
    closer.start()
    start = time.monotonic()
    outbox.announce_step([(1, 7)], wait_s=20)
    assert time.monotonic() - start < 10
    closer.join()
