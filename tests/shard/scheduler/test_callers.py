"""Callers share a shard: whoever alone asks for everything gets it, and a short request starts at once."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest

from lorikeet.proto.params import LogprobParams
from lorikeet.shard.requests.request import FinishReason, Request, Unconstrained
from lorikeet.shard.scheduler.budget import RECENT_STEPS, SHARED_S, Limits
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.scheduler import Scheduler

FLOOD, CANARY = "flood", "canary"


class Compiling(Unconstrained):
    """A grammar that is being compiled."""

    is_ready = False


class Steps:
    """A scheduler without a model: every token is 1."""

    def __init__(self, limits: Limits, num_pages: int = 4000) -> None:
        self.scheduler = Scheduler(KvCache(num_pages, page_size=4, prefix_caching=False), limits)
        self.num_added = 0

    def add(self, caller: str, num_prompt: int = 4, max_new_tokens: int = 100, **fields: Any) -> Request:
        self.num_added += 1
        ids = [2] * num_prompt
        request = Request((1, self.num_added), ids, num_prompt, max_new_tokens, caller=caller, **fields)
        self.scheduler.add(request)
        return request

    def step(self, num_steps: int = 1) -> Counter[str]:
        """Returns the tokens that the last step computed, by caller."""
        for _ in range(num_steps):
            tokens = Counter[str]()
            for item in self.scheduler.plan().items():
                tokens[item.request.caller] += item.num_tokens
                self.scheduler.commit(item, [1] if item.samples else [])
            self.scheduler.check()
        return tokens

    @property
    def running(self) -> Counter[str]:
        return Counter(request.caller for request in self.scheduler.running)


def test_a_caller_alone_gets_everything() -> None:
    steps = Steps(Limits(step_tokens=512, max_running=8, short_room=2))
    flood = [steps.add(FLOOD) for _ in range(20)]
    steps.step()
    assert steps.running == {FLOOD: 8}
    assert [request.row >= 0 for request in flood] == [True] * 8 + [False] * 12


def test_a_short_request_starts_at_once_next_to_a_full_shard() -> None:
    steps = Steps(Limits(step_tokens=512, max_running=8, short_room=4))
    for _ in range(20):
        steps.add(FLOOD, max_new_tokens=1000)
    steps.step(3)
    canary = steps.add(CANARY, max_new_tokens=2)
    steps.step(2)
    assert canary.finish_reason is FinishReason.LENGTH
    assert steps.running == {FLOOD: 3}  # short steps, as long as the other caller may send the next request
    steps.step(RECENT_STEPS + 2)
    assert steps.running == {FLOOD: 8}


def test_a_request_gets_the_pages_of_a_caller_that_has_all() -> None:
    steps = Steps(Limits(step_tokens=512, max_running=8, short_room=64), num_pages=40)
    for _ in range(4):
        steps.add(FLOOD, num_prompt=36, max_new_tokens=4)
    steps.step()
    assert steps.running == {FLOOD: 4}
    canary = steps.add(CANARY, num_prompt=12, max_new_tokens=2)
    steps.step(3)
    assert canary.finish_reason is FinishReason.LENGTH


def test_steps_overlap_while_no_caller_can_give_pages() -> None:
    """With one request each, callers keep their pages, and the next step need not wait for them."""
    steps = Steps(Limits(step_tokens=512, max_running=8, short_room=64), num_pages=24)
    for caller in ("a", "b"):
        steps.add(caller, num_prompt=36, max_new_tokens=4)
    steps.step()
    waiting = steps.add(CANARY, num_prompt=36, max_new_tokens=2)
    steps.step()
    assert waiting.row < 0 and not steps.scheduler.awaits_commit
    flood = steps.add("a", num_prompt=4, max_new_tokens=4)
    steps.step(6)
    assert waiting.finish_reason and flood.finish_reason


def test_prompts_of_callers_share_a_step() -> None:
    steps = Steps(Limits(step_tokens=64, max_running=8))
    steps.add(FLOOD, num_prompt=4000)
    steps.add(FLOOD, num_prompt=4000)
    assert steps.step() == {FLOOD: 64}
    canary = steps.add(CANARY, num_prompt=20)
    assert steps.step() == {FLOOD: 44, CANARY: 20}
    assert canary.num_output == 1
    steps.add(CANARY, num_prompt=4000)
    assert steps.step() == {FLOOD: 32, CANARY: 33}  # one token of the request that decodes


def test_a_short_prompt_is_computed_first_in_small_steps() -> None:
    steps = Steps(Limits(step_tokens=24, max_running=64, short_room=64), num_pages=8000)
    floods = [f"{FLOOD} {number}" for number in range(8)]
    for caller in floods:
        steps.add(caller, num_prompt=2000)
    assert steps.step() == dict.fromkeys(floods, 3), "who asks for much has an equal share"
    canary = steps.add(CANARY, num_prompt=12, max_new_tokens=2)
    tokens = steps.step()
    assert canary.num_computed == 12 and tokens[CANARY] == 12
    assert sum(tokens[caller] for caller in floods) == 8, "the others share the rest of the step"
    steps.step()
    longer = steps.add(CANARY, num_prompt=60)
    steps.step()
    assert longer.num_computed == 12, "it gets half of a step at most"


def test_short_prompts_are_computed_whole_although_others_are_shorter() -> None:
    steps = Steps(Limits(step_tokens=40, max_running=64, short_room=64), num_pages=8000)
    for number in range(8):
        steps.add(f"{FLOOD} {number}", num_prompt=2000)
    steps.step()
    shortest, short = (steps.add(f"{CANARY} {num}", num_prompt=num, max_new_tokens=2) for num in (6, 12))
    tokens = steps.step()
    assert (shortest.num_computed, short.num_computed) == (6, 12)
    assert tokens.total() == 18 + 8 * 2, "the others share the rest of the step"


def test_prompts_of_callers_share_the_prefill_cap_of_an_adapter() -> None:
    steps = Steps(Limits(step_tokens=512, max_running=16, adapter_prefill_tokens=32))
    steps.add("other", adapter_digest="a", max_new_tokens=1000)
    for _ in range(4):
        steps.add(FLOOD, num_prompt=4000, max_new_tokens=4)
    steps.step(2)
    assert steps.step() == {FLOOD: 32, "other": 1}
    canary = steps.add(CANARY, num_prompt=20, max_new_tokens=2)
    assert steps.step() == {FLOOD: 16, CANARY: 16, "other": 1}
    assert steps.step() == {FLOOD: 28, CANARY: 4, "other": 1}
    assert canary.num_output == 1
    steps.add(CANARY, num_prompt=12, adapter_digest="a", max_new_tokens=2)
    assert steps.step()[CANARY] == 12 + 1, "the adapter with fewer requests has no cap"


def test_prompts_of_other_adapters_take_nothing_of_a_prefill_cap() -> None:
    steps = Steps(Limits(step_tokens=512, max_running=16, adapter_prefill_tokens=32))
    for _ in range(4):
        steps.add(FLOOD, num_prompt=4000, max_new_tokens=4)
    steps.add(CANARY, num_prompt=1500, adapter_digest="a")
    assert {steps.step()[FLOOD] for _ in range(4)} == {0, 32}, "they take turns with prompts without a cap"


def test_prompts_of_callers_share_the_scored_tokens_of_a_step() -> None:
    steps = Steps(Limits(step_tokens=512, max_running=16, max_scored=64))
    scored = LogprobParams(prefill=True)
    for _ in range(4):
        steps.add(FLOOD, num_prompt=4000, logprobs=scored)
    assert steps.step() == {FLOOD: 64}
    canary = steps.add(CANARY, num_prompt=20, max_new_tokens=2, logprobs=scored)
    assert steps.step() == {FLOOD: 44, CANARY: 20}
    assert canary.num_output == 1
    steps.add("other", num_prompt=4000)
    assert steps.step()[FLOOD] == 64, "other prompts take none of them"


def test_a_step_does_not_look_at_requests_that_may_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(Limits(step_tokens=64, max_running=16, short_room=8), num_pages=9000)
    steps.add(CANARY)
    for _ in range(1000):
        steps.add(FLOOD)
    steps.step(3)
    looked_at = []
    is_parked = steps.scheduler.is_parked
    monkeypatch.setattr(steps.scheduler, "is_parked", lambda request: looked_at.append(request) or is_parked(request))
    steps.add(CANARY)
    steps.step()
    assert steps.running == {FLOOD: 6, CANARY: 2}
    assert {request.caller for request in looked_at} == {CANARY}


def test_steps_are_short_for_a_caller_next_to_one_with_more_than_its_share() -> None:
    """Requests that a router holds back count as asked for: it sends no more than a caller's share."""
    numbers = []
    for num_held in (0, 100):
        steps = Steps(Limits(step_tokens=4096, max_running=8, short_room=4))
        for _ in range(7):
            steps.scheduler.prompt_chunks.observe(100, 100, 0.05)
        steps.add(CANARY, num_prompt=1)
        steps.add(FLOOD, num_prompt=2000, num_held=num_held)
        numbers.append(steps.step()[FLOOD])
    assert numbers == [700, 2000 * SHARED_S]
    steps.add(FLOOD, num_prompt=2000)
    assert steps.step()[FLOOD] > 100, "none waits in the router"


def test_waiting_callers_take_turns_by_their_weights() -> None:
    steps = Steps(Limits(step_tokens=512, max_running=1))
    for name, share in (("a", 1.0), ("b", 3.0)):
        for _ in range(40):
            steps.add(name, num_prompt=40, max_new_tokens=1, share=share)
    ran = Counter(name for _ in range(40) for name in steps.step())
    assert ran["a"] == pytest.approx(10, abs=2) and ran["b"] == pytest.approx(30, abs=2)


def num_calls_of_a_step(num_waiting: int, num_callers: int, has_row: bool) -> int:
    """Python functions that are called while the last step of requests that only decode is planned."""
    num_running = 64
    limits = Limits(step_tokens=4096, max_running=num_running + has_row, short_room=1)
    scheduler = (steps := Steps(limits, num_pages=10_000)).scheduler
    for number in range(num_running + num_waiting):
        request = steps.add(f"caller {number % num_callers}", max_new_tokens=1000)
        if has_row and number >= num_running:
            request.constraint = Compiling()
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    for _ in range(4):
        num_calls = 0
        sys.setprofile(count)
        plan = scheduler.plan()
        sys.setprofile(None)
        for item in plan.scheduled:
            scheduler.commit(item, [1])
            scheduler.decode(item.request)
        if (decode := plan.decode) is not None:
            scheduler.decoding.commit(decode, np.ones(num_running, np.int64), np.zeros(num_running, bool))
    assert not plan.scheduled and len(scheduler.decoding) == num_running
    return num_calls


def test_a_step_of_a_full_shard_calls_nothing_for_each_request_that_waits() -> None:
    for num_callers in (1, 4):
        none, some = (num_calls_of_a_step(num_waiting, num_callers, has_row=False) for num_waiting in (4, 200))
        assert none == some


def test_the_calls_of_a_step_are_in_proportion_to_the_callers_that_wait() -> None:
    """Those whose requests cannot run yet, in a shard with a free row."""
    few, many = (num_calls_of_a_step(num, 64 + num, has_row=True) for num in (100, 400))
    assert many < 5 * few


def test_a_caller_without_requests_is_forgotten() -> None:
    steps = Steps(Limits(step_tokens=512, max_running=8))
    steps.add(FLOOD, max_new_tokens=1000)
    steps.add(CANARY, max_new_tokens=1)
    steps.step()
    assert steps.scheduler.callers.are_several
    steps.step(RECENT_STEPS + 2)
    assert not steps.scheduler.callers.are_several


def test_the_backlog_of_some_callers_does_not_make_the_steps_of_others_long() -> None:
    steps = Steps(Limits(step_tokens=4096, max_running=16, short_room=16), num_pages=100_000)
    for _ in range(10):
        steps.scheduler.prompt_chunks.observe(100, 100, seconds=0.1)  # 1 ms per token
        steps.scheduler.prompt_chunks.observe(0, 1, seconds=0.001)
    steps.add(CANARY, max_new_tokens=1000)
    steps.step()
    for number in range(8):
        for _ in range(4):
            steps.add(f"{FLOOD} {number}", num_prompt=2000, max_new_tokens=1)
    assert steps.step().total() <= 130  # a sixteenth of 2 048 tokens; alone, such a backlog has steps of 350
