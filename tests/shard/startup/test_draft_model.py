"""Speculative decoding with a draft model: no text changes, the draft model's KV is correct after any history, and it
computes no more tokens than needed.
"""

import random
from dataclasses import replace

import pytest

from lorikeet.proto.params import Method, Schedule, Speculation
from lorikeet.shard.requests.request import FinishReason, Request, Source
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.engine.test_speculation import (
    DISTRIBUTIONS,
    SETUPS,
    assert_equal,
    make_mix,
    mixed_distributions,
    texts_alone,
)
from tests.shard.fake_model import DraftModel, generate_alone
from tests.shard.rig import Rig, Setup, copy_of, make_request

DRAFTS = DraftSettings(has_draft_model=True)
WIDTHS = (1, 3, 5, 10)
SCHEDULES = list(Schedule)


def drafting(requests: list[Request], method: Method = Method.DRAFT) -> list[Request]:
    """All but every fourth request speculate."""
    for i, request in enumerate(requests):
        request.speculation = Speculation(method, WIDTHS[i % 4]) if i % 4 else Speculation()
    return requests


CHANCES = (0.7, 1.0, 0.0)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in ("default", "chunks of 7", "lag 1") else pytest.mark.long)
        for case, name in enumerate(SETUPS)
    ],
)
def test_every_text_is_what_it_is_without(case: int) -> None:
    setup, chance = list(SETUPS.values())[case], CHANCES[case % 3]
    requests = drafting(mixed_distributions())
    alone = texts_alone(requests)
    rig = Rig(replace(setup, drafts=DRAFTS, draft=DraftModel(chance)))
    rig.watches_kv = True
    outputs = rig.run(*requests)
    for request in requests:
        assert_equal(outputs[request.key[1]], alone[request.key[1]])
    num_drafted = sum(sum(output.num_drafted) for output in outputs.values())
    num_accepted = sum(output.num_accepted for output in outputs.values())
    assert num_drafted > 15
    low, high = {0.0: (0.0, 0.2), 0.7: (0.2, 0.9), 1.0: (0.8, 1.0)}[chance]  # drafts behind a stop are not emitted
    assert low <= num_accepted / num_drafted <= high
    for output in outputs.values():
        assert output.sources.count(Source.DRAFT) == output.num_accepted <= sum(output.num_drafted)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(values, id=name, marks=() if name in ("greedy", "all penalties") else pytest.mark.long)
        for name, values in DISTRIBUTIONS.items()
    ],
)
def test_the_same_model_drafts_what_is_drawn(values: dict[str, object]) -> None:
    """Drafts use every transform of the target at its position, and the same noise."""
    requests = drafting(make_mix(**values))
    alone = texts_alone(requests)
    outputs = Rig(Setup(drafts=DRAFTS, draft=DraftModel())).run(*requests)
    for request in requests:
        assert_equal(outputs[request.key[1]], alone[request.key[1]])
        output = outputs[request.key[1]]
        num_left = sum(output.num_drafted) - output.num_accepted
        has_ended = output.finish_reason is FinishReason.EOS  # drafts behind a stop token are not emitted
        assert 0 <= num_left < (request.speculation.num_tokens if has_ended else 1) or num_left == 0


def test_first_passes_and_further_ones_are_timed_apart() -> None:
    request = make_request(1, [5, 6, 7], 40, speculation=Speculation(Method.DRAFT, 4, schedule=Schedule.AUTO))
    rig = Rig(Setup(drafts=DRAFTS, draft=DraftModel()))
    observed: list[tuple[float, float]] = []
    assert rig.engine.scheduler.proposer is not None
    draft_length = rig.engine.scheduler.proposer.draft_length
    draft_length._best = lambda offers, *_: offers.widths  # type: ignore[method-assign] # independent of time
    learn = draft_length.drafting
    learn.observe = lambda *of: observed.append(of[2])  # type: ignore[method-assign,func-returns-value]
    rig.run(request)
    assert len(observed) > 3
    assert all(first > 0 and further > 0 for first, further in observed)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("default", Schedule.AUTO),
        ("few pages, lag 1, chunks of 7, no prefixes", Schedule.HEURISTIC),
        pytest.param("default", Schedule.HEURISTIC, marks=pytest.mark.long),
        pytest.param("lag 1", Schedule.HEURISTIC, marks=pytest.mark.long),
        pytest.param("lag 1", Schedule.AUTO, marks=pytest.mark.long),
        pytest.param("few pages, lag 1, chunks of 7, no prefixes", Schedule.AUTO, marks=pytest.mark.long),
    ],
)
def test_no_schedule_changes_a_text(name: str, schedule: Schedule) -> None:
    requests = drafting(mixed_distributions(), Method.AUTO)
    for request in requests:
        request.speculation = replace(request.speculation, schedule=schedule)
    alone = texts_alone(requests)
    rig = Rig(replace(SETUPS[name], drafts=DRAFTS, draft=DraftModel(0.6)))
    rig.watches_kv = True
    outputs = rig.run(*requests)
    for request in requests:
        assert_equal(outputs[request.key[1]], alone[request.key[1]])
    # auto depends on measured times, by which drafts may not pay here
    assert sum(sum(output.num_drafted) for output in outputs.values()) > (0 if schedule is Schedule.AUTO else 15)


def test_right_drafts_take_fewer_steps() -> None:
    request = make_request(1, [1, 2, 3], 41, speculation=Speculation(Method.DRAFT, 4))
    rig = Rig(Setup(drafts=DRAFTS, draft=DraftModel()))
    output = rig.run(request)[1]
    assert output.num_drafted == (0, 0, 32, 0, 0) and output.num_accepted == 32
    assert rig.model.num_steps == 1 + 40 // 5
    assert rig.draft is not None
    assert rig.draft.num_steps == 1 + 4 * 8
    # the prompt; the first token; then each time the last draft, which it drew but never took in, and the bonus
    assert rig.draft.num_tokens == 3 + (1 + 3) + 7 * (2 + 3)
    assert output.seconds[0] > 0 and output.seconds[1] > 0 and output.seconds[2] > 0


def test_a_text_ends_at_its_stop_inside_a_block() -> None:
    text = Rig().run(make_request(1, [1, 2, 3], 20))[1].token_ids
    stop = text[3]  # the first token has no drafts; of the block after it this is the third
    assert stop not in text[:3]
    request = make_request(1, [1, 2, 3], 20, stop_ids=frozenset({stop}), speculation=Speculation(Method.DRAFT, 6))
    output = Rig(Setup(drafts=DRAFTS, draft=DraftModel())).run(request)[1]
    assert output.token_ids == text[:4]
    assert (output.num_drafted, output.num_accepted) == ((0, 0, 6, 0, 0), 3)


def test_a_prefix_that_the_draft_model_knows_is_not_taken_in_again() -> None:
    prompt = list(range(40))
    rig = Rig(Setup(drafts=DRAFTS, draft=DraftModel()))
    assert rig.draft is not None
    rig.run(make_request(1, prompt, 2, speculation=Speculation(Method.DRAFT, 4)))
    first = rig.draft.num_tokens
    assert first == 40  # there is no room for a draft behind the first token of two
    rig.run(make_request(2, prompt, 2, speculation=Speculation(Method.DRAFT, 4)))
    assert rig.draft.num_tokens - first == 4


def test_a_prefix_that_only_the_target_knows_is_taken_in() -> None:
    prompt = list(range(40))
    rig = Rig(Setup(drafts=DRAFTS, draft=DraftModel()))
    assert rig.draft is not None
    rig.watches_kv = True
    rig.run(make_request(1, prompt, 10))
    assert rig.draft.num_tokens == 0
    requests = [make_request(i, prompt, 10, speculation=Speculation(Method.DRAFT, 4)) for i in (2, 3)]
    alone = texts_alone(requests)
    outputs = rig.run(*requests)
    for request in requests:
        assert_equal(outputs[request.key[1]], alone[request.key[1]])
        assert outputs[request.key[1]].num_accepted > 0


def test_lookup_goes_before_the_draft_model_which_then_catches_up() -> None:
    request = make_request(1, [1, 2, 3, 4, 5, 6, 7, 8] * 3, 40, speculation=Speculation(Method.AUTO, 4))
    alone = Rig().run(copy_of(request, 1))[1]
    rig = Rig(Setup(drafts=DRAFTS, draft=DraftModel()))
    rig.watches_kv = True
    output = rig.run(request)[1]
    assert output.token_ids == alone.token_ids
    assert output.num_drafted[2] > 0


@pytest.mark.parametrize("num_known", [1, 4])
def test_the_first_token_after_a_move_is_the_target_s_own(num_known: int) -> None:
    """Even if a prefix hit leaves one token to compute, as in any other step."""
    text = Rig().run(make_request(1, [1, 2, 3, 4, 5], 20))[1].token_ids
    rig = Rig(Setup(drafts=DRAFTS, draft=DraftModel()))
    for number in (1, 2):
        moved = make_request(number, [1, 2, 3, 4, 5], 20, speculation=Speculation(Method.DRAFT, 4))
        moved.token_ids += text[:num_known]
        output = rig.run(moved)[number]
        assert output.token_ids == text[num_known:]
        assert Source(output.sources[0]) is Source.TARGET and output.step_ends[0] == 1
        assert Source.PREFILL not in output.sources


def test_nobody_is_preempted_for_a_draft() -> None:
    """The drafts of one request fill the memory; pages of rejected drafts are free again when another needs one."""
    drafting_request = make_request(1, [1] * 8, 16, speculation=Speculation(Method.DRAFT, 10))
    other = make_request(2, [2] * 8, 5)
    rig = Rig(Setup(num_pages=6, drafts=DRAFTS, draft=DraftModel(0.0), prefix_caching=False))
    rig.submit(drafting_request, other)
    rig.step(2)
    assert len(drafting_request.page_ids) == 3 and sum(rig.outputs[1].num_drafted) == 3
    rig.step(3)
    assert other.finish_reason and not rig.scheduler.num_preempted


@pytest.mark.parametrize("lag", [0, 1])
def test_requests_that_join_leave_and_are_cancelled_change_nobody(lag: int) -> None:
    """With memory for a few of them, so that some are preempted in the middle of a block."""
    rng = random.Random(lag)
    setup = Setup(num_pages=18, step_tokens=23, max_running=6, commit_lag=lag, drafts=DRAFTS, draft=DraftModel(0.7))
    rig = Rig(setup)
    rig.watches_kv = True
    requests: dict[int, Request] = {}
    cancelled: set[int] = set()
    for number in range(40):
        prompt = [rng.randrange(5)] * rng.randrange(1, 20) + [number]
        wanted = Speculation(
            rng.choice([Method.DRAFT, Method.AUTO]), rng.randrange(1, 9), schedule=rng.choice(SCHEDULES)
        )
        requests[number] = make_request(number, prompt, rng.randrange(1, 30), speculation=wanted)
        rig.submit(requests[number])
        rig.step(rng.randrange(1, 5))
        if rng.random() < 0.3:
            cancelled.add(rng.randrange(number + 1))
            rig.abort(*cancelled)
    while not rig.scheduler.is_idle:
        rig.step()
    rig.assert_clean()
    for number, request in requests.items():
        alone = generate_alone(request.token_ids[: request.num_prompt], request.max_new_tokens)
        found = rig.outputs[number].token_ids
        assert found == alone[: len(found)]
        assert found == alone or number in cancelled
        assert Source.PREFILL not in rig.outputs[number].sources[1:]
    assert rig.scheduler.num_preempted > 0
    assert sum(output.num_accepted for output in rig.outputs.values()) > 50


@pytest.mark.parametrize("width", [1, 4, 7])
def test_steps_and_sources_add_up(width: int) -> None:
    """One forward pass for each step that emitted tokens, each ended by a token of the target."""
    wanted = Speculation(Method.DRAFT, width)
    rig = Rig(Setup(drafts=DRAFTS, draft=DraftModel(0.7)))
    output = rig.run(make_request(1, [4, 5, 6], 60, speculation=wanted))[1]
    sources = [Source(source) for source in output.sources]
    num_steps = output.step_ends.count(1)
    assert rig.model.num_steps == num_steps
    assert len(output.token_ids) == 60 == num_steps + output.num_accepted
    own = {Source.PREFILL, Source.TARGET, Source.RESAMPLE, Source.BONUS}
    assert [source in own for source in sources] == [bool(end) for end in output.step_ends]
    assert sources.count(Source.DRAFT) == output.num_accepted
    drafted = sum(output.num_drafted)
    assert drafted - output.num_accepted >= sources.count(Source.RESAMPLE) > 0
    assert drafted <= width * (num_steps - 1)
