"""Requests that only decode are planned and committed as arrays. Everything is as if each were planned like others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.proto.params import LogprobParams, Method, SamplingParams, Schedule, Speculation
from lorikeet.shard.grpc.streams import Output, TokenColumns
from lorikeet.shard.requests.request import FinishReason, Request, ScheduledRequest, Source
from lorikeet.shard.speculation.costs import Load
from lorikeet.shard.speculation.drafter import DraftSettings
from lorikeet.shard.speculation.history_index import HistoryIndex
from lorikeet.shard.speculation.length import NetworkLoad
from tests.shard.fake_model import VOCAB_SIZE, DraftModel, generate_alone
from tests.shard.rig import SAMPLED, SCORED, Rig, Setup, make_request
from tests.shard.speculation.scripted_drafts import ScriptedDrafts, script_device

HEADS = "heads"
LOGPROBS = LogprobParams(wanted=True, alternatives=3)
KINDS = (
    {},
    {"sampling": SamplingParams(do_sample=True, temperature=1.1, seed=3), "logprobs": LogprobParams(wanted=True)},
    {"sampling": SAMPLED, "logprobs": LOGPROBS},
    {"logprobs": SCORED},
    {"logprobs": LogprobParams(alternatives=21)},
    {"logprobs": LogprobParams(alternatives=2)},
    {"speculation": Speculation(Method.LOOKUP, 3)},
    {"speculation": Speculation(Method.LOOKUP, 4, schedule=Schedule.AUTO)},
    {"speculation": Speculation(Method.LOOKUP, 2, schedule=Schedule.AUTO), "adapter_digest": "a"},
    {"speculation": Speculation(Method.AUTO, 3, schedule=Schedule.HEURISTIC)},
    {"speculation": Speculation(Method.MEDUSA, 0, 3), "heads_digest": HEADS},
    {"speculation": Speculation(Method.MEDUSA, 0, 2, Schedule.AUTO), "heads_digest": HEADS},
    {"speculation": Speculation(Method.MEDUSA, 2, 5, Schedule.HEURISTIC), "heads_digest": HEADS, "adapter_digest": "a"},
    {"speculation": Speculation(Method.AUTO, 2, 3, Schedule.AUTO), "heads_digest": HEADS, "sampling": SAMPLED},
    {"speculation": Speculation(Method.AUTO, 3, 2), "heads_digest": HEADS},
    {"speculation": Speculation(Method.AUTO, 3, schedule=Schedule.AUTO), "tenant": "one"},
    {"speculation": Speculation(Method.AUTO, 3, 2, Schedule.AUTO), "tenant": "one", "heads_digest": HEADS},
    {"speculation": Speculation(Method.LOOKUP, 4), "tenant": "one"},
    {"speculation": Speculation(Method.DRAFT, 3)},
    {"speculation": Speculation(Method.DRAFT, 4, schedule=Schedule.AUTO), "sampling": SAMPLED},
    {"speculation": Speculation(Method.DRAFT, 2, schedule=Schedule.HEURISTIC), "logprobs": LOGPROBS},
    {"stop_ids": frozenset(range(0, VOCAB_SIZE, 9))},
    {"stop_ids": frozenset((1, 5)), "isolation_steps": 2},
)


@dataclass(frozen=True)
class Arrival:
    """A request, and the steps before it comes and, if it is aborted, until then."""

    kind: int
    num_prompt: int
    num_new: int
    delay: int
    aborted_after: int | None

    def make(self, number: int) -> Request:
        """Prompts of the first kind begin alike, those of all others differ from the first token on."""
        first = 3 if self.kind == 0 else 4 + number
        prompt = [(first + at * at) % VOCAB_SIZE for at in range(self.num_prompt)]
        return make_request(number, prompt, self.num_new, **KINDS[self.kind])


ARRIVALS = st.lists(
    st.builds(
        Arrival, st.integers(0, len(KINDS) - 1), st.integers(1, 14), st.integers(1, 24), st.integers(0, 4),
        st.none() | st.integers(1, 20),
    ),
    min_size=1,
    max_size=10,
    unique_by=lambda each: (each.kind, each.num_prompt),
)  # fmt: skip
"""No two requests have the same prompt: if both run, and one ends, either may publish the page that both have."""
SETUPS = st.builds(
    lambda pages, running, lag, caching, on_device, fewest, drafts: lambda: Setup(
        num_pages=pages, max_running=running, commit_lag=lag, prefix_caching=caching, step_tokens=16,
        drafts=DraftSettings(5, has_draft_model=drafts, fewest_rows=fewest, history=HistoryIndex(0)),
        draft=DraftModel(0.7) if drafts else None,
        drafts_on_device=on_device and lag == 1,
    ),
    st.integers(10, 40), st.integers(1, 8), st.integers(0, 1), st.booleans(), st.booleans(), st.integers(1, 4),
    st.booleans(),
)  # fmt: skip


def values(outputs: dict[int, Output]) -> dict[int, Output]:
    """Outputs without times."""
    return {number: replace(output, seconds=(0.0, 0.0, 0.0)) for number, output in outputs.items()}


def time_steps(rig: Rig, seconds_per_token: float) -> None:
    """Let each step take a time that depends on its tokens alone, so that schedule `auto` chooses the same."""
    lengths = rig.scheduler.proposer.draft_length
    observe = lengths.observe

    def timed(
        step: Sequence[ScheduledRequest], load: Load, _: float, __: tuple[float, float], of_networks: NetworkLoad
    ) -> None:
        draft_seconds = 0.1 + of_networks.num_drawn / 50, of_networks.num_passes / 10
        observe(step, load, 1 + seconds_per_token * load.num_tokens + sum(draft_seconds), draft_seconds, of_networks)

    lengths.observe = timed  # type: ignore[method-assign]


def run(
    setup: Callable[[], Setup], arrivals: Sequence[Arrival], one_by_one: bool, seconds_per_token: float
) -> list[object]:
    """What is seen of each step: outputs so far, preemptions, pages, and who runs."""
    rig = Rig(setup())
    rig.scheduler.adapters.num_heads = lambda digest: 4 * (digest == HEADS)  # type: ignore[method-assign]
    time_steps(rig, seconds_per_token)
    rig.watches_kv = True
    if one_by_one:
        rig.scheduler.decode = lambda request: None  # type: ignore[method-assign]
    due = sorted((sum(each.delay for each in arrivals[: at + 1]), at) for at in range(len(arrivals)))
    seen: list[object] = []
    for step in range(2000):
        while due and due[0][0] <= step:
            number = due.pop(0)[1]
            rig.submit(arrivals[number].make(number))
        for number, arrival in enumerate(arrivals):
            if arrival.aborted_after is not None and step == arrival.delay * number + arrival.aborted_after:
                rig.abort(number)
        update = rig.step()
        scheduler = rig.scheduler
        running = [request.key for request in scheduler.running]
        # without times, and without what is sent at once when the expected time changes
        status = replace(update.status, step_ms=0, expected_ms=0, gap_us=0, num_preempted=scheduler.num_preempted)
        seen.append((status, update.acknowledged, running, values(rig.outputs)))
        if not due and scheduler.is_idle:
            break
    rig.assert_clean()
    return seen


@settings(max_examples=60, deadline=None)
@given(SETUPS, ARRIVALS, st.sampled_from([0.01, 0.2, 2.0]))
def test_arrays_give_what_requests_one_by_one_give(
    setup: Callable[[], Setup], arrivals: list[Arrival], seconds_per_token: float
) -> None:
    expected, found = (run(setup, arrivals, each, seconds_per_token) for each in (True, False))
    assert len(found) == len(expected)
    for before, after in zip(expected, found, strict=True):
        assert before == after


def test_no_step_waits_for_the_token_before_the_last_one() -> None:
    """No draft may follow it, whether the request is a row or not."""
    arrivals = [Arrival(0, 1, 1, 0, None)] * 4 + [Arrival(7, 1, 2, 0, None), Arrival(0, 1, 1, 0, None)]
    setup = Setup(10, max_running=1, commit_lag=1, step_tokens=16, drafts=DraftSettings(5, fewest_rows=1))
    one_by_one, as_arrays = (run(lambda: setup, arrivals, each, 0.01) for each in (True, False))
    assert one_by_one == as_arrays


@pytest.mark.parametrize("lag", [0, 1])
def test_requests_that_only_decode_are_arrays(lag: int) -> None:
    rig = Rig(Setup(commit_lag=lag))
    requests = [make_request(number, [number, 2, 3], 20) for number in range(4)]
    rig.submit(*requests)
    rig.step(5)
    assert all(request.is_decoding for request in requests)
    assert len(rig.scheduler.decoding) == 4
    assert not rig.scheduler.schedule()
    outputs = rig.run()
    for number, request in enumerate(requests):
        assert outputs[number].token_ids == generate_alone([number, 2, 3], 20) == request.token_ids[3:]
        assert outputs[number].finish_reason is FinishReason.LENGTH and not request.is_decoding


def test_no_columns_are_sent_for_requests_that_have_all_ended() -> None:
    rig = Rig()
    rig.submit(*(make_request(number, [number, 2, 3], 6) for number in range(2)))
    sent: list[Output | TokenColumns] = []
    for _ in range(8):
        rig.engine.step()
        sent += rig.outbox.take(1).outputs
    assert [len(part.ids) for part in sent if isinstance(part, TokenColumns)] == [2, 2, 2, 2]
    ended = [part.key[1] for part in sent if isinstance(part, Output) and part.finish_reason]
    assert ended == [0, 1]


@pytest.mark.parametrize("schedule", [Schedule.CONSTANT, Schedule.AUTO])
@pytest.mark.parametrize("chance", [1.0, 0.6])
def test_requests_whose_drafts_the_device_makes_are_arrays(
    chance: float, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of them makes no object for each either, whether drafts are accepted or not."""
    prompts = [[number, 2, 3] for number in range(4)]
    texts = {number: prompt + generate_alone(prompt, 150) for number, prompt in enumerate(prompts)}
    rig = Rig(Setup(commit_lag=1, drafts=ScriptedDrafts(texts=texts, chance=chance), drafts_on_device=True))
    script_device(rig, texts, chance)
    time_steps(rig, 0.001)
    speculation = Speculation(Method.LOOKUP, 3, schedule=schedule)
    requests = [make_request(number, prompt, 150, speculation=speculation) for number, prompt in enumerate(prompts)]
    rig.submit(*requests)
    rig.step(4 if schedule is Schedule.CONSTANT else 26)  # it has rested, because no step without drafts was measured
    assert all(request.is_decoding for request in requests)
    decode = rig.engine._launched[-1].plan.decode
    assert decode is not None and decode.widths.tolist() == decode.num_uncertain.tolist() == [3] * 4
    with monkeypatch.context() as patch:
        patch.setattr("lorikeet.shard.scheduler.scheduler.ScheduledRequest", None)
        patch.setattr("lorikeet.shard.scheduler.decoding.ScheduledRequest", None)
        patch.setattr("lorikeet.shard.grpc.streams.Output", None)
        rig.engine.step()
        update = rig.outbox.take(1)
    [columns] = update.outputs
    assert isinstance(columns, TokenColumns) and columns.drafts is not None
    assert columns.drafts.num_drafted.tolist() == [3] * 4
    assert columns.drafts.num_tokens.tolist() == (columns.drafts.num_accepted + 1).tolist()
    rig.run()
    for number, request in enumerate(requests):
        assert request.token_ids == texts[number]
        assert request.finish_reason is FinishReason.LENGTH and not request.is_decoding


@pytest.mark.parametrize("lag", [0, 1])
def test_requests_are_arrays_while_too_many_run_for_drafts(lag: int) -> None:
    """Those whose drafts the host makes. They have drafts again as soon as few enough run."""
    prompts = [[number, 2, 3] for number in range(4)]
    texts = {number: prompt + generate_alone(prompt, 40) for number, prompt in enumerate(prompts)}
    rig = Rig(Setup(commit_lag=lag, drafts=ScriptedDrafts(texts=texts, chance=1.0, max_batch_size=2)))
    speculation = Speculation(Method.LOOKUP, 3)
    lengths = (40, 40, 12, 12)
    requests = [make_request(at, prompts[at], lengths[at], speculation=speculation) for at in range(4)]
    rig.submit(*requests)
    rig.step(6)
    assert all(request.is_decoding for request in requests)
    while len(rig.scheduler.running) > 2:
        rig.step()
    num_before = len(requests[0].token_ids)
    rig.step(3)
    assert not len(rig.scheduler.decoding.members.pausing)
    assert len(requests[0].token_ids) >= num_before + 8
    rig.run()
    for number, request in enumerate(requests):
        assert request.token_ids == texts[number][: 3 + lengths[number]]


@pytest.mark.parametrize("schedule", [Schedule.CONSTANT, Schedule.AUTO])
@pytest.mark.parametrize("lag", [0, 1])
def test_requests_whose_drafts_the_host_looks_up_are_arrays(
    lag: int, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of them makes no object for each, whether their drafts are accepted or not."""
    texts = {number: [number, 2, 3] + generate_alone([number, 2, 3], 60) for number in range(4)}
    rig = Rig(Setup(commit_lag=lag, drafts=ScriptedDrafts(texts=texts, chance=0.6, fewest_rows=4)))
    time_steps(rig, 0.001)
    speculation = Speculation(Method.LOOKUP, 3, schedule=schedule)
    requests = [make_request(number, texts[number][:3], 60, speculation=speculation) for number in texts]
    rig.submit(*requests)
    rig.step(24 if schedule is Schedule.AUTO else 4)
    assert all(request.is_decoding for request in requests)
    with monkeypatch.context() as patch:
        patch.setattr("lorikeet.shard.scheduler.scheduler.ScheduledRequest", None)
        patch.setattr("lorikeet.shard.scheduler.decoding.ScheduledRequest", None)
        patch.setattr("lorikeet.shard.grpc.streams.Output", None)
        rig.engine.step()
        rig.engine.step()
        columns = rig.outbox.take(1).outputs[-1]
    assert isinstance(columns, TokenColumns) and columns.drafts is not None
    assert columns.drafts.num_drafted.tolist() == [3] * 4
    assert columns.drafts.num_tokens.tolist() == (columns.drafts.num_accepted + 1).tolist()
    rig.run()
    assert all(request.token_ids == texts[number] for number, request in enumerate(requests))


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(
    "name", ["heads, lag 0", "heads, lag 1", "heads, device", "draft model, lag 0", "draft model, lag 1"]
)
def test_requests_with_networks_are_arrays(name: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of them makes no object for each, whether their drafts are accepted or not."""
    network, where = name.split(", ")
    drafts = DraftSettings(fewest_rows=4, has_draft_model=network == "draft model")
    setup = Setup(commit_lag=int(where != "lag 0"), drafts=drafts, drafts_on_device=where == "device")
    setup = replace(setup, draft=DraftModel(0.7) if network == "draft model" else None)
    speculation, source = Speculation(Method.MEDUSA, 0, 3, schedule), Source.MEDUSA
    if network == "draft model":
        speculation, source = Speculation(Method.DRAFT, 3, 0, schedule), Source.DRAFT
    texts = {number: [number, 2, 3] + generate_alone([number, 2, 3], 100) for number in range(4)}
    one_by_one, rig = Rig(setup), Rig(setup)
    for each in (one_by_one, rig):
        each.scheduler.adapters.num_heads = lambda digest: 4 * (digest == HEADS)  # type: ignore[method-assign]
        time_steps(each, 0.001)
        requests = [
            make_request(number, text[:3], 100, speculation=speculation, heads_digest=HEADS)
            for number, text in texts.items()
        ]
        each.submit(*requests)
    one_by_one.scheduler.decode = lambda request: None  # type: ignore[method-assign]
    rig.step(4 if schedule is Schedule.CONSTANT else 25)
    assert all(request.is_decoding for request in requests)
    with monkeypatch.context() as patch:
        patch.setattr("lorikeet.shard.scheduler.scheduler.ScheduledRequest", None)
        patch.setattr("lorikeet.shard.scheduler.decoding.ScheduledRequest", None)
        patch.setattr("lorikeet.shard.grpc.streams.Output", None)
        patch.setattr("lorikeet.shard.engine.step.HeadsRow", None)
        patch.setattr("lorikeet.shard.speculation.draft_network.Segment", None)
        rig.engine.step()
        update = rig.outbox.take(1)
    rig.take(update)
    [columns] = update.outputs
    assert isinstance(columns, TokenColumns) and columns.drafts is not None
    num_drafted = columns.drafts.num_drafted.tolist()
    assert num_drafted == [3] * 4 or (schedule is not Schedule.CONSTANT and min(num_drafted) > 0)
    assert columns.drafts.draft_sources.tolist() == [source] * 4
    assert columns.drafts.num_tokens.tolist() == (columns.drafts.num_accepted + 1).tolist()
    assert values(rig.run()) == values(one_by_one.run())
    assert all(request.token_ids == texts[number] for number, request in enumerate(requests))


def test_a_step_of_the_same_requests_makes_no_object_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.submit(*(make_request(number, [number, 2, 3], 20) for number in range(4)))
    rig.step(3)
    monkeypatch.setattr("lorikeet.shard.scheduler.scheduler.ScheduledRequest", None)
    monkeypatch.setattr("lorikeet.shard.scheduler.decoding.ScheduledRequest", None)
    monkeypatch.setattr("lorikeet.shard.grpc.streams.Output", None)
    rig.engine.step()
    [columns] = rig.outbox.take(1).outputs
    assert columns.ids.tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]
