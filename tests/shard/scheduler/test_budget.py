"""What prompts get of a step, in all and by adapter."""

import pytest

from lorikeet.shard.requests.request import FinishReason, Request
from lorikeet.shard.scheduler.adapter_slots import NoAdapters
from lorikeet.shard.scheduler.budget import LEAST_CAP, LEAST_TOKENS, MOST_CAP, RECENT_STEPS, Limits, PromptChunks
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.scheduler import Scheduler


class OneParked(NoAdapters):
    """Every adapter but one is in a slot."""

    def acquire(self, digest: str) -> int | None:
        return -1 if self.is_resident(digest) else None

    def is_resident(self, digest: str) -> bool:
        return digest != "parked"


def requests_of(adapter: str, count: int, first: int, num_prompt: int = 32) -> list[Request]:
    return [
        Request((1, first + i), [i % 61] * num_prompt, num_prompt, max_new_tokens=1000, adapter_digest=adapter)
        for i in range(count)
    ]


def busy_scheduler(*requests: Request, step_tokens: int = 512) -> Scheduler:
    scheduler = Scheduler(KvCache(9000, 4, prefix_caching=False), Limits(step_tokens, 64, adapter_prefill_tokens=16))
    for request in requests:
        scheduler.add(request)
    return scheduler


def step(scheduler: Scheduler) -> tuple[dict[str, list[int]], int]:
    """Prompt tokens of the next step by adapter, and how many requests decode."""
    prompts: dict[str, list[int]] = {}
    num_decoding = 0
    for item in scheduler.schedule():
        if item.num_tokens > 1:
            prompts.setdefault(item.request.adapter_digest, []).append(item.num_tokens)
        else:
            num_decoding += 1
        scheduler.commit(item, [7] if item.samples else [])
    return prompts, num_decoding


def test_a_flooding_adapter_alternates_with_others_and_has_a_capped_part_of_a_step() -> None:
    scheduler = busy_scheduler(*requests_of("flood", 8, 0), *requests_of("a", 1, 100), *requests_of("", 1, 200))
    assert step(scheduler) == ({"a": [32], "": [32]}, 0)
    assert step(scheduler) == ({"flood": [16]}, 2)
    assert step(scheduler) == ({"flood": [16]}, 2)
    scheduler.add(*requests_of("b", 1, 300))
    assert step(scheduler) == ({"b": [32]}, 3)
    scheduler.add(*requests_of("c", 1, 400))
    assert step(scheduler) == ({"c": [32], "flood": [16]}, 4)
    for _ in range(20):
        step(scheduler)
    assert step(scheduler) == ({}, 12)


def test_prompts_of_other_adapters_that_fill_many_steps_alternate_with_all_prompts() -> None:
    others = [requests_of(f"other {i}", 1, 100 + i, num_prompt=100)[0] for i in range(4)]
    scheduler = busy_scheduler(*requests_of("popular", 3, 0), *others, step_tokens=64)
    seen = []
    for number in range(4):
        seen.append(step(scheduler)[0])
        scheduler.add(*requests_of(f"new {number}", 1, 200 + number, num_prompt=100))
    assert seen == [
        {"other 0": [64]},
        {"other 0": [36], "popular": [28]},
        {"other 1": [64]},
        {"popular": [4, 24], "other 1": [36]},
    ]


def test_prompts_of_other_adapters_that_fill_few_steps_go_first() -> None:
    others = [requests_of(f"other {i}", 1, 100 + i)[0] for i in range(9)]
    scheduler = busy_scheduler(*requests_of("popular", 3, 0), *others, step_tokens=64)
    pairs = [{f"other {i}": [32], f"other {i + 1}": [32]} for i in (0, 2, 4, 6)]
    assert [step(scheduler)[0] for _ in range(6)] == [*pairs, {"other 8": [32]}, {"popular": [24]}]


def test_prompts_that_wait_for_their_adapter_fill_no_step() -> None:
    scheduler = busy_scheduler(*requests_of("popular", 3, 0), *requests_of("a", 1, 50), step_tokens=64)
    scheduler.adapters = OneParked()
    scheduler.add(*requests_of("parked", 1, 60, num_prompt=1000))
    assert step(scheduler) == ({"a": [32]}, 0)
    assert step(scheduler) == ({"popular": [24]}, 1)


def test_one_request_more_costs_little() -> None:
    scheduler = busy_scheduler(*requests_of("a", 2, 0, num_prompt=100), *requests_of("b", 3, 100, num_prompt=100))
    assert [step(scheduler) for _ in range(3)] == [({"a": [100, 100]}, 0), ({"b": [48]}, 2), ({"b": [48]}, 2)]


def test_as_many_requests_of_each_adapter_take_what_they_need() -> None:
    scheduler = busy_scheduler(*requests_of("a", 2, 0), *requests_of("b", 2, 100), *requests_of("", 2, 200))
    assert step(scheduler) == ({"a": [32] * 2, "b": [32] * 2, "": [32] * 2}, 0)


def test_an_adapter_alone_has_the_step_but_not_for_a_while_after_others() -> None:
    other = requests_of("a", 1, 100, num_prompt=2)[0]
    scheduler = busy_scheduler(*requests_of("flood", 5, 0))
    assert step(scheduler) == ({"flood": [32] * 5}, 0)
    scheduler.add(other)
    assert step(scheduler) == ({"a": [2]}, 5)
    scheduler.finish(other, FinishReason.ABORTED)
    for request in requests_of("flood", 2, 50):
        scheduler.add(request)
    assert step(scheduler) == ({"flood": [16]}, 5)
    for _ in range(RECENT_STEPS):
        step(scheduler)
    for request in requests_of("flood", 5, 60):
        scheduler.add(request)
    assert step(scheduler) == ({"flood": [32] * 5}, 7)


def test_prompts_computed_whole_have_no_caps() -> None:
    scheduler = Scheduler(KvCache(1000, 4), Limits(512, 64, chunked_prefill=False, adapter_prefill_tokens=16))
    for request in [*requests_of("flood", 4, 0), *requests_of("a", 1, 100)]:
        scheduler.add(request)
    assert step(scheduler) == ({"flood": [32] * 4, "a": [32]}, 0)


@pytest.mark.parametrize(
    ("token_ms", "decode_ms", "num_waiting", "num_decoding", "wanted"),
    [
        (1.0, 20, 256, 8, 62),  # few prompts: 70 ms in all
        (1.0, 20, 256, 0, 350),  # nobody waits for a step to end
        (1.0, 20, 8192, 8, 342),  # many prompts
        (1.0, 20, 3200, 8, 192),
        (0.02, 8, 4000, 8, 3492),
        (0.02, 8, 400_000, 8, 4096),  # the limit
        (40.0, 600, 100, 2, 20),  # a slow machine: half as long again as a step without prompts
        (40.0, 600, 100_000, 8, 52),
        (400.0, 600, 256, 8, LEAST_TOKENS),
    ],
)
def test_prompt_tokens_of_a_step_follow_measured_times(
    token_ms: float, decode_ms: float, num_waiting: int, num_decoding: int, wanted: int
) -> None:
    chunks = PromptChunks(Limits(4096, 64))
    assert chunks.choose(num_waiting, num_decoding) == 4096
    for disturbed in (1, 1, 30):
        chunks.observe(64, 64, 64 * token_ms * disturbed / 1000)
        chunks.observe(0, 8, decode_ms * disturbed / 1000)
        chunks.observe(3, 11, 99.0)  # too few prompt tokens
    assert chunks.choose(num_waiting, num_decoding) == pytest.approx(wanted, abs=1)


def test_steps_become_larger_again_after_slow_ones() -> None:
    chunks = PromptChunks(Limits(4096, 64))
    for _ in range(7):
        chunks.observe(64, 64, 6.4)
    assert chunks.choose(100_000, 8) == LEAST_TOKENS
    for _ in range(7):
        chunks.observe(LEAST_TOKENS // 2, LEAST_TOKENS, 0.016)
    assert chunks.choose(100_000, 8) == 342


@pytest.mark.parametrize(
    ("decode_ms", "token_ms", "cap"),
    [(20, 1.0, 30), (21, 0.375, 84), (20, 1e-9, MOST_CAP), (1, 1.6, LEAST_CAP)],
)
def test_the_prefill_cap_follows_the_times_of_steps_while_serving(decode_ms: float, token_ms: float, cap: int) -> None:
    chunks = PromptChunks(Limits(4096, 64, adapter_prefill_tokens=64, follows_times=True))
    assert (chunks.choose(9000, num_decoding=1), chunks.adapter_cap()) == (64, 64)
    chunks.observe(64, 64, 64 * token_ms / 1000)
    assert chunks.adapter_cap() == 64  # no step without prompts was timed
    for disturbed in (40, 1, 1, 1, 25, 1, 1):  # a neighbour took the processor for a moment
        chunks.observe(64, 64, 64 * token_ms * disturbed / 1000)
        chunks.observe(0, 8, decode_ms * disturbed / 1000)
    assert chunks.adapter_cap() == pytest.approx(cap, abs=1)
    fixed = PromptChunks(Limits(4096, 64, adapter_prefill_tokens=2048))
    fixed.observe(64, 64, 1.0)
    fixed.observe(0, 8, 1.0)
    assert fixed.adapter_cap() == 2048


def test_a_step_of_less_than_the_first_cap_stays_within_its_limit() -> None:
    assert PromptChunks(Limits(32, 64, adapter_prefill_tokens=64, follows_times=True)).choose(9000, 1) == 32


def test_prompts_that_are_not_divided_have_the_whole_limit() -> None:
    chunks = PromptChunks(Limits(4096, 64, chunked_prefill=False))
    chunks.observe(64, 64, 1.0)
    assert chunks.choose(256, num_decoding=1) == 4096


def test_a_scheduler_divides_a_prompt_next_to_a_request_that_decodes() -> None:
    scheduler = Scheduler(KvCache(9000, 4, prefix_caching=False), Limits(4096, 64))
    scheduler.prompt_chunks.observe(64, 64, 0.064)
    for request in requests_of("", 2, 0, num_prompt=300):
        scheduler.add(request)
    assert step(scheduler) == ({"": [300, 50]}, 0)  # 350 ms
    assert step(scheduler) == ({"": [69]}, 1)  # 70 ms
    assert step(scheduler) == ({"": [69]}, 1)
