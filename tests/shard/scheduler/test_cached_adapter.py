"""Which adapters are kept: fewer are loaded again than where the least recently used leave, also when popularity
moves.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from lorikeet.shard.scheduler.adapter_slots import EXPECTED_USES, AdapterSlots, EvictionScores, SlotLimits
from tests.shard.scheduler.test_adapter_slots import Device, Weights

NUM_ADAPTERS, NUM_REQUESTS = 1000, 6000
MEBIBYTE = 2**20


def wanted(moves_at: int | None = None) -> list[int]:
    """Adapters of requests, the k-th asked for 1/k as often; from `moves_at` on others are the popular ones."""
    shares = 1 / np.arange(1, NUM_ADAPTERS + 1)
    drawn = np.random.default_rng(0).choice(NUM_ADAPTERS, NUM_REQUESTS, p=shares / shares.sum())
    if moves_at is not None:
        drawn[moves_at:] = (drawn[moves_at:] + NUM_ADAPTERS // 2) % NUM_ADAPTERS
    return drawn.tolist()


SIZES = (2 * MEBIBYTE * np.random.default_rng(1).choice([1, 2, 4, 8], NUM_ADAPTERS)).tolist()
"""Bytes of adapters of ranks from 8 to 64."""
ROOM = sum(SIZES) // 5


def loads(requests: Sequence[int]) -> int:
    """How often a shard reads a file, one request after the other, after the first quarter of them."""
    asked: list[str] = []
    slots = AdapterSlots(SlotLimits(NUM_ADAPTERS, ROOM, ROOM), Device(), asked.append)
    num_before = 0
    for number, adapter in enumerate(requests):
        num_before = len(asked) if number == len(requests) // 4 else num_before
        digest = str(adapter)
        if slots.acquire(digest) is None:
            slots.loaded(digest, Weights(digest, SIZES[adapter]))
            assert slots.acquire(digest) is not None
        slots.release(digest)
    return len(asked) - num_before


def loads_by_recency(requests: Sequence[int]) -> int:
    """The same where the least recently used leave."""
    kept: OrderedDict[int, int] = OrderedDict()
    num_loads = 0
    for number, adapter in enumerate(requests):
        if adapter in kept:
            kept.move_to_end(adapter)
            continue
        num_loads += number >= len(requests) // 4
        while sum(kept.values()) + SIZES[adapter] > ROOM:
            kept.popitem(last=False)
        kept[adapter] = SIZES[adapter]
    return num_loads


def test_fewer_are_loaded_again() -> None:
    assert loads(wanted()) <= 0.85 * loads_by_recency(wanted())


def test_popularity_may_move() -> None:
    requests = wanted(moves_at=NUM_REQUESTS // 2)
    assert loads(requests) <= 0.95 * loads_by_recency(requests)


def test_an_adapter_that_is_used_no_more_leaves() -> None:
    scores = EvictionScores()
    once_popular = scores.of(1000, MEBIBYTE)
    for _ in range(1000):
        scores.evicted(scores.of(1, MEBIBYTE))
    assert scores.of(1, MEBIBYTE) > once_popular


def test_one_that_requests_wait_for_stays_before_one_used_once() -> None:
    scores = EvictionScores()
    assert scores.of(0, MEBIBYTE) == scores.of(EXPECTED_USES, MEBIBYTE) > scores.of(1, MEBIBYTE)
    assert scores.of(1, MEBIBYTE) > scores.of(1, 8 * MEBIBYTE), "a small one takes less room for nearly the same cost"
