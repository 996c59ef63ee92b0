"""The step loop over a model that notices every wrong page, slot and position: texts, log probabilities, failures."""

import itertools
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from lorikeet.shard.engine import engine
from lorikeet.shard.engine.step import Step
from lorikeet.shard.grpc.streams import Details, Output, Status, StreamEnded
from lorikeet.shard.requests.request import FinishReason, Request
from lorikeet.shard.scheduler.scheduler import StepPlan
from tests.shard.fake_model import VOCAB_SIZE, generate_alone, logits_after, states_of
from tests.shard.rig import EPOCH, SAMPLED, SCORED, Rig, Setup, copy_of, make_request

SETUPS = {
    "default": Setup(),
    "chunks of 7": Setup(step_tokens=7),
    "whole prompts": Setup(step_tokens=7, chunked_prefill=False),
    "lag 1": Setup(commit_lag=1),
    "lag 1, chunks of 7": Setup(commit_lag=1, step_tokens=7),
    "few pages": Setup(num_pages=24),
    "few pages, lag 1": Setup(num_pages=24, commit_lag=1),
    "few pages, lag 1, chunks of 7, no prefixes": Setup(24, commit_lag=1, step_tokens=7, prefix_caching=False),
    "pages of one token": Setup(page_size=1, commit_lag=1),
    "one at a time": Setup(max_running=1),
}


SAMPLE = ("default", "lag 1, chunks of 7", "few pages, lag 1, chunks of 7, no prefixes")
some_setups = pytest.mark.parametrize(
    "setup",
    [pytest.param(SETUPS[name], id=name, marks=() if name in SAMPLE else pytest.mark.long) for name in SETUPS],
    indirect=True,
)


@pytest.fixture(params=SETUPS.values(), ids=SETUPS.keys())
def setup(request: pytest.FixtureRequest) -> Setup:
    value = request.param
    assert isinstance(value, Setup)
    return value


def make_mix(**values: object) -> list[Request]:
    """Sixteen requests: three families that share beginnings, some the same prompt, lengths from 1 to 40."""
    rng = random.Random(5)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(30)] for _ in range(3)]
    requests = []
    for i in range(16):
        prompt = stems[i % 3][: rng.randrange(31)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 10))]
        requests.append(make_request(i, prompt, rng.randrange(1, 30), **values))
    requests.append(copy_of(requests[4], 16))
    return requests


def test_every_text_is_what_it_is_alone(setup: Setup) -> None:
    rig = Rig(setup)
    requests = make_mix(stop_ids=frozenset({7}))
    outputs = rig.run(*requests)
    for request in requests:
        output = outputs[request.key[1]]
        alone = generate_alone(request.token_ids[: request.num_prompt], request.max_new_tokens, request.stop_ids)
        assert output.token_ids == alone
        assert output.finish_reason is (FinishReason.EOS if alone[-1] == 7 else FinishReason.LENGTH)
        assert len(output.sources) == len(output.step_ends) == len(alone)
        assert list(output.sources) == [0] + [1] * (len(alone) - 1)
    assert any(output.finish_reason is FinishReason.EOS for output in outputs.values())
    assert rig.scheduler.num_preempted > 0 or setup.num_pages > 24


@some_setups
def test_a_seed_gives_one_text_everywhere(setup: Setup) -> None:
    requests = make_mix(sampling=SAMPLED)
    outputs = Rig(setup).run(*requests)
    for request in requests[:6]:
        alone = Rig().run(copy_of(request, 0))[0]
        assert outputs[request.key[1]].token_ids == alone.token_ids


@some_setups
def test_log_probabilities_of_prompt_and_output_are_complete(setup: Setup) -> None:
    requests = make_mix(logprobs=SCORED)
    rig = Rig(replace(setup, max_scored=5))
    rig.run(*make_mix())  # so that prefixes could be hit
    rig.outputs.clear()
    outputs = rig.run(*requests)
    for request in requests:
        output = outputs[request.key[1]]
        details = output.details or Details()
        states = states_of(request.token_ids)
        distributions = torch.stack([logits_after(states[:n]) for n in range(1, len(states))]).log_softmax(-1)
        expected = distributions.gather(1, torch.tensor(request.token_ids[1:])[:, None])[:, 0].tolist()
        assert details.prefill_logprobs == pytest.approx(expected[: request.num_prompt - 1])
        own = distributions.gather(1, torch.tensor(request.token_ids[1:])[:, None])
        ranks = ((distributions > own).sum(-1) + 1).tolist()
        assert details.prefill_ranks == ranks[: request.num_prompt - 1]
        assert output.logprobs == pytest.approx(expected[request.num_prompt - 1 :])
        top = distributions.topk(3)
        num_scores = request.num_prompt - 1
        assert details.prefill_alternative_ids == top.indices[:num_scores].flatten().tolist()
        assert details.prefill_alternative_logprobs == pytest.approx(top.values[:num_scores].flatten().tolist())
        assert details.alternative_ids == top.indices[num_scores:, :2].flatten().tolist()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_burst_of_one_prompt_computes_it_once(lag: int) -> None:
    rig = Rig(Setup(commit_lag=lag))
    prompt = list(range(41))
    outputs = rig.run(*[make_request(i, prompt, 2, sampling=replace(SAMPLED, seed=i)) for i in range(8)])
    assert rig.model.num_tokens <= 41 + 7 * 1 + 8 + 8 * lag
    assert [outputs[i].num_cached for i in range(8)] == [0] + [40] * 7


def test_a_request_that_waits_for_a_page_does_not_block_others() -> None:
    rig = Rig()
    prompt = list(range(40))
    rig.submit(make_request(1, prompt, 4), make_request(2, prompt, 4), make_request(3, [9], 1))
    rig.step()
    assert rig.outputs[3].finish_reason is FinishReason.LENGTH
    assert rig.outputs[1].token_ids and 2 not in rig.outputs
    assert rig.run()[2].num_cached == 36


def test_a_request_that_waits_for_a_page_runs_when_its_owner_is_gone() -> None:
    rig = Rig(Setup(step_tokens=16))
    prompt = list(range(40))
    rig.submit(make_request(1, prompt, 4), make_request(2, prompt, 4))
    rig.step()
    rig.abort(1)
    assert rig.run()[2].token_ids == generate_alone(prompt, 4)
    assert rig.outputs[2].num_cached == 16  # what the first had computed was not lost


def test_a_prompt_is_found_again_after_its_request_has_ended() -> None:
    rig = Rig()
    first = rig.run(make_request(1, list(range(30)), 20))[1]
    text = list(range(30)) + first.token_ids
    again = rig.run(make_request(2, text, 5))[2]
    assert again.num_cached == 48  # full pages of prompt and output: the newest token was never computed
    assert again.token_ids == generate_alone(text, 5)


def test_salts_keep_prefixes_apart() -> None:
    rig = Rig()
    rig.run(make_request(1, list(range(30)), 1, cache_salt="a"))
    outputs = rig.run(
        make_request(2, list(range(30)), 1, cache_salt="b"), make_request(3, list(range(30)), 1, cache_salt="a")
    )
    assert (outputs[2].num_cached, outputs[3].num_cached) == (0, 28)


def test_an_earlier_run_is_resumed() -> None:
    prompt = list(range(10))
    whole = Rig().run(make_request(1, prompt, 12, sampling=SAMPLED))[1].token_ids
    resumed = make_request(1, prompt + whole[:5], 12, sampling=SAMPLED, num_prompt=10)
    assert Rig().run(resumed)[1].token_ids == whole[5:]


@pytest.mark.parametrize("lag", [0, 1])
def test_an_abort_at_any_moment_gives_the_pages_back(lag: int) -> None:
    for moment in range(8):
        rig = Rig(Setup(commit_lag=lag, step_tokens=16))
        rig.submit(make_request(1, list(range(40)), 9), make_request(2, list(range(50, 20, -1)), 9))
        rig.step(moment)
        rig.abort(1)
        outputs = rig.run()
        assert outputs[1].finish_reason is FinishReason.ABORTED
        assert outputs[2].token_ids == generate_alone(list(range(50, 20, -1)), 9)


def test_a_lost_stream_gives_the_pages_back() -> None:
    rig = Rig(Setup(commit_lag=1))
    rig.submit(*make_mix())
    rig.step(3)
    rig.inbox.put(StreamEnded(EPOCH))
    rig.step(3)
    rig.assert_clean()


def test_a_deadline_ends_a_request() -> None:
    rig = Rig()
    late = make_request(1, list(range(9)), 100, deadline=time.monotonic() + 0.01)
    rig.submit(late, make_request(2, list(range(9)), 3))
    rig.step()
    time.sleep(0.02)
    outputs = rig.run()
    assert outputs[1].finish_reason is FinishReason.DEADLINE
    assert outputs[1].token_ids == generate_alone(list(range(9)), 100)[: len(outputs[1].token_ids)]
    assert outputs[2].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("lag", [0, 1])
def test_nan_logits_fail_their_request_alone(lag: int) -> None:
    rig = Rig(Setup(commit_lag=lag))
    rig.model.poison = 60
    good, bad = make_request(1, [1, 2, 3], 9), make_request(2, [1, 60, 3, 4, 5, 6], 9)
    outputs = rig.run(good, bad)
    assert (outputs[2].finish_reason, outputs[2].token_ids) == (FinishReason.ERROR, [])
    assert "finite" in outputs[2].error and not outputs[2].retryable
    alone = generate_alone([1, 2, 3], 9)
    assert outputs[1].token_ids == (alone[: alone.index(60)] if 60 in alone else alone)


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_failing_step_fails_its_requests_and_no_other(lag: int) -> None:
    prompt = list(range(40))
    for moment in range(6):  # within the prompt and within the output
        rig = Rig(Setup(commit_lag=lag, step_tokens=16))
        rig.submit(make_request(1, prompt, 9))
        rig.step(moment)
        rig.model.failures = [RuntimeError("out of luck")]
        rig.submit(make_request(2, [50], 3))
        outputs = rig.run()
        assert outputs[1].finish_reason is FinishReason.ERROR
        assert outputs[1].retryable
        assert outputs[1].token_ids == generate_alone(prompt, 9)[: len(outputs[1].token_ids)]
        outputs = rig.run(make_request(3, prompt, 9))
        assert outputs[3].token_ids == generate_alone(prompt, 9)  # nothing that was not computed can be found again


@pytest.mark.parametrize("lag", [0, 1])
def test_isolated_requests_are_computed_alone_and_announced(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a step is launched, its requests are announced, and those of an isolated request's step exactly."""
    monkeypatch.setattr("lorikeet.shard.engine.engine.ACK_TIMEOUT_S", 0.001)  # no stream reads
    rig = Rig(Setup(commit_lag=lag))
    steps, announced = list[set[int]](), list[set[int]]()
    newest = set[int]()
    launch = rig.engine._launch

    def note(plan: StepPlan) -> Step:
        nonlocal newest
        computing = rig.outbox._buffers[EPOCH].update.step_requests
        newest = newest if computing is None else set(computing)
        steps.append({item.request.key[1] for item in plan.items()})
        announced.append(newest)
        return launch(plan)

    rig.engine._launch = note  # type: ignore[method-assign]
    requests = [make_request(i, list(range(i, i + 9)), 12) for i in range(5)]
    requests[1].isolation_steps, requests[3].isolation_steps = 4, 2
    outputs = rig.run(*requests)
    for request in requests:
        assert outputs[request.key[1]].token_ids == generate_alone(request.token_ids[:9], 12)
    for suspect, isolation_steps in ((1, 4), (3, 2)):
        own = [step for step in steps if suspect in step]
        assert own[:isolation_steps] == [{suspect}] * isolation_steps
        assert own[isolation_steps] > {suspect}
        assert [known for known in announced if suspect in known][:isolation_steps] == own[:isolation_steps]
    assert all(step <= known for step, known in zip(steps, announced, strict=True))


@pytest.mark.parametrize("lag", [0, 1])
def test_the_step_after_an_isolated_one_waits_for_routers_too(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a crash in that step would be attributed to the isolated request."""
    rig = Rig(Setup(commit_lag=lag))
    words = list[tuple[set[int], bool]]()

    def note(keys: set[tuple[int, int]], wait_s: float = 0.0) -> None:
        words.append(({key[1] for key in keys}, wait_s > 0))

    monkeypatch.setattr(rig.outbox, "announce_step", note)
    rig.submit(make_request(1, [1], 30), make_request(2, [2], 30, isolation_steps=2))
    rig.step(8)
    assert words == [({2}, True), ({1}, True), ({2}, True), ({1, 2}, True)]


def test_a_broken_device_ends_the_loop() -> None:
    rig = Rig()
    rig.submit(make_request(1, [1], 3))
    rig.model.failures = [RuntimeError("CUDA error: an illegal memory access was encountered")]
    with pytest.raises(RuntimeError, match="illegal memory"):
        rig.step()


def test_a_leak_ends_the_loop_when_idle() -> None:
    rig = Rig()
    rig.run(make_request(1, [1, 2], 3))
    rig.scheduler.cache._free.pop()
    rig.submit(make_request(2, [1, 2], 3))
    with pytest.raises(RuntimeError, match="leaked"):
        rig.engine.run()


def test_freed_memory_is_returned_once_after_each_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    returned, num_returned = threading.Semaphore(0), itertools.count(1)
    monkeypatch.setattr(engine, "REST_S", 0.01)
    monkeypatch.setattr(engine, "return_freed_memory", lambda: returned.release() or next(num_returned))
    rig = Rig()
    rig.submit(make_request(1, [1, 2], 3))
    loop = threading.Thread(target=rig.engine.run)
    loop.start()
    assert returned.acquire(timeout=60)
    assert not returned.acquire(timeout=0.1)
    rig.submit(make_request(2, [1, 2], 3))
    assert returned.acquire(timeout=60)
    rig.engine.stop()
    loop.join(60)
    assert not loop.is_alive() and next(num_returned) == 3


def test_credit_is_what_could_start_soon() -> None:
    rig = Rig(Setup(num_pages=20, page_size=4, max_running=8))
    credit = rig.step().status
    assert (credit.credit_requests, credit.credit_tokens) == (9, 80)
    rig.submit(make_request(1, list(range(10)), 5), make_request(2, list(range(20, 30)), 5))
    update = rig.step()
    assert update.acknowledged == 2
    assert update.status.credit_requests == 7
    assert update.status.credit_tokens == (20 - 3 - 3 - 2) * 4
    rig.run()
    assert rig.step().status.credit_tokens == 80


def test_more_than_the_credit_is_refused() -> None:
    rig = Rig(Setup(max_running=1, max_waiting=2))
    outputs = rig.run(*[make_request(i, [i], 2) for i in range(5)])
    refused = [i for i, output in outputs.items() if output.finish_reason is FinishReason.ERROR]
    assert refused == [3, 4]
    assert all(outputs[i].retryable for i in refused)


def test_an_id_used_twice_ends_in_one_error() -> None:
    rig = Rig()
    rig.submit(make_request(1, [1, 2], 9))
    rig.step()
    outputs = rig.run(make_request(1, [5], 9))
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert outputs[1].token_ids == generate_alone([1, 2], 9)[:1]
    assert "twice" in outputs[1].error


def test_the_latest_is_preempted_and_comes_back_first() -> None:
    rig = Rig(Setup(num_pages=12, page_size=2))
    first, second = make_request(1, [1, 2, 3, 4, 5], 12), make_request(2, [6, 7, 8, 9, 10], 12)
    rig.submit(first, second)
    while not rig.scheduler.num_preempted:
        rig.step()
    rig.submit(make_request(3, [11], 1))
    rig.step()
    assert rig.scheduler.running == [first]
    assert rig.scheduler.waiting[0] is second
    assert rig.run()[2].token_ids == generate_alone([6, 7, 8, 9, 10], 12)


def test_stop_finishes_running_requests_and_a_second_stop_does_not() -> None:
    rig = Rig()
    rig.submit(make_request(1, [1, 2], 30))
    rig.step()
    rig.engine.stop()
    rig.submit(make_request(2, [1, 2], 30))
    rig.engine.run()
    outputs = rig.run()
    assert outputs[1].finish_reason is FinishReason.LENGTH
    assert outputs[2].finish_reason is FinishReason.ERROR and outputs[2].retryable
    rig = Rig()
    rig.submit(make_request(1, [1, 2], 30))
    rig.step()
    rig.engine.stop()
    rig.engine.stop()
    rig.engine.run()
    assert len(rig.scheduler.requests) == 1


def test_warming_up_leaves_nothing_behind() -> None:
    rig = Rig()
    rig.engine.warm_up()
    rig.assert_clean()
    assert rig.scheduler.cache.num_available == 200
    rig.model.failures = [ValueError("no such kernel")]
    with pytest.raises(RuntimeError, match="ValueError"):
        rig.engine.warm_up()


def test_every_preemption_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(Setup(num_pages=24))
    reported: list[int] = []
    publish = rig.outbox.publish

    def record(outputs: list[Output], status: Status, *others: Any) -> None:
        reported.append(status.num_preempted)
        publish(outputs, status, *others)

    monkeypatch.setattr(rig.outbox, "publish", record)
    expected = itertools.cycle([0.010, 0.100])
    monkeypatch.setattr(rig.engine._step_costs, "estimate", lambda *_: next(expected))
    rig.run(*make_mix())
    assert sum(reported) == rig.scheduler.num_preempted > 0


def test_a_changed_step_time_is_announced_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    reported: list[tuple[int, int, int]] = []
    publish = rig.outbox.publish

    def record(outputs: list[Output], status: Status, *others: Any) -> None:
        reported.append((status.step, status.expected_ms, len(outputs)))
        publish(outputs, status, *others)

    monkeypatch.setattr(rig.outbox, "publish", record)
    expected = {4: 0.050, 1: 0.049, 33: 0.200}
    monkeypatch.setattr(rig.engine._step_costs, "estimate", lambda num_tokens, _: expected[num_tokens])
    rig.submit(make_request(1, [5] * 4, 4))
    rig.step(2)  # the second is as long as the first, nearly
    rig.submit(make_request(2, [6] * 32, 4))
    rig.step()
    assert reported == [(0, 50, 0), (1, 50, 1), (2, 50, 1), (2, 200, 0), (3, 200, 2)]
