"""History drafts in the step loop, over a model that detects every wrong page: texts do not depend on them, and no
tenant gets drafts from another one's outputs.
"""

from dataclasses import replace

import pytest

from lorikeet.proto.params import Method, SamplingParams, Schedule, Speculation
from lorikeet.shard.requests.request import Request, Source, Unconstrained
from lorikeet.shard.speculation.drafter import DraftSettings, Pages
from lorikeet.shard.speculation.drafters import Drafters, best_offer
from lorikeet.shard.speculation.history_index import MIN_BYTES, HistoryIndex
from tests.shard.fake_model import DraftModel
from tests.shard.rig import SAMPLED, Rig, Setup, copy_of, make_request

SPECULATION = Speculation(Method.LOOKUP, 6)
SETUPS = {
    "default": Setup(),
    "lag 1": Setup(commit_lag=1),
    "few pages": Setup(30),
    "chunks of 7, lag 1": Setup(step_tokens=7, commit_lag=1),
    "with a draft model": Setup(draft=DraftModel(0.5)),
}
SAMPLE = (
    (Schedule.CONSTANT, "default"),
    (Schedule.CONSTANT, "few pages"),
    (Schedule.AUTO, "lag 1"),
    (Schedule.AUTO, "with a draft model"),
)


def rig(setup: Setup | None = None) -> Rig:
    setup = setup or Setup()
    sources = DraftSettings(ngram_min=4, has_draft_model=setup.draft is not None, history=HistoryIndex(MIN_BYTES))
    return Rig(replace(setup, drafts=sources))


def make(number: int, tenant: str, sampling: SamplingParams | None = None, **values: object) -> Request:
    prompt_ids = [1 + (number * 7 + at) % 40 for at in range(9)]
    values = {"speculation": SPECULATION, **values}
    return make_request(number, prompt_ids, 40, sampling=sampling or SamplingParams(), tenant=tenant, **values)


def again(request: Request, number: int, tenant: str) -> Request:
    repeated = copy_of(request, number)
    repeated.tenant = tenant
    return repeated


@pytest.mark.parametrize(
    ("schedule", "setup"),
    [
        pytest.param(
            schedule, setup, id=f"{schedule}-{name}", marks=() if (schedule, name) in SAMPLE else pytest.mark.long
        )
        for schedule in (Schedule.CONSTANT, Schedule.AUTO)
        for name, setup in SETUPS.items()
    ],
)
def test_texts_do_not_depend_on_history(setup: Setup, schedule: Schedule) -> None:
    method = Method.AUTO if setup.draft else Method.LOOKUP
    speculation = Speculation(method, 6, schedule=schedule)
    first = [
        make(number, "one", (SamplingParams(), replace(SAMPLED, seed=number))[number % 2], speculation=speculation)
        for number in range(1, 9)
    ]
    expected = {request.key[1]: Rig().run(copy_of(request, request.key[1]))[request.key[1]] for request in first}
    engine = rig(setup)
    engine.run(*first)
    repeated = [again(request, request.key[1] + 10, "one") for request in first]
    found = engine.run(*repeated)
    for number, output in expected.items():
        assert found[number].token_ids == found[number + 10].token_ids == output.token_ids
    sources = [source for request in repeated for source in found[request.key[1]].sources]
    assert schedule is Schedule.AUTO or sources.count(Source.HISTORY) > 100


def test_a_repeated_request_takes_few_steps() -> None:
    engine, request = rig(), make(1, "one")
    engine.run(request)
    found = engine.run(again(request, 2, "one"))[2]
    assert bytes(found.step_ends).count(1) <= 1 + -(-40 // 7) + 1
    assert found.num_drafted[-1] >= found.num_accepted >= 30


@pytest.mark.parametrize("tenant", ["two", ""])
def test_another_tenant_gets_no_drafts(tenant: str) -> None:
    engine, request = rig(), make(1, "one")
    engine.run(request)
    found = engine.run(again(request, 2, tenant))[2]
    assert Source.HISTORY not in found.sources and not (found.num_drafted and found.num_drafted[-1])


def test_another_adapter_gets_no_drafts() -> None:
    sources = rig().scheduler.proposer.drafters
    ended = make(1, "one", adapter_digest="a" * 64)
    ended.token_ids += range(1, 20)
    sources.finished(ended)
    for digest, is_found in (("a" * 64, True), ("b" * 64, False), ("", False)):
        request = make(2, "one", adapter_digest=digest)
        request.token_ids += range(1, 9)
        offer = best_offer(sources.of(request), request, 9)
        assert (offer is not None and offer.source == Source.HISTORY) == is_found


def test_nothing_is_kept_of_requests_without_a_tenant_or_with_an_error() -> None:
    engine = rig()
    engine.run(make(1, ""))
    engine.submit(make(2, "one"))
    engine.step(3)
    engine.scheduler.running[0].constraint = failed = Unconstrained()
    failed.error = "a fault of this request alone"
    engine.step(2)
    assert engine.outputs[2].error
    history = engine.scheduler.proposer.drafters.settings.history
    assert isinstance(history, HistoryIndex) and len(history) == 0


def test_the_output_of_an_aborted_request_is_kept() -> None:
    """Stop strings end requests in this way."""
    engine, request = rig(), make(1, "one")
    engine.submit(request)
    engine.step(30)
    engine.abort(1)
    engine.step()
    assert Source.HISTORY in engine.run(again(request, 2, "one"))[2].sources


def test_a_longer_match_goes_before_a_shorter_one_of_lookup() -> None:
    sources = Drafters(DraftSettings(history=HistoryIndex(MIN_BYTES)), Pages(4, []))
    ended = make_request(1, [1, 2], 40, tenant="one")
    ended.token_ids += [10, 11, 12, 13, 14, 15]
    sources.finished(ended)
    request = make_request(2, [13, 99, 10, 11, 12, 13], 40, tenant="one", speculation=SPECULATION)
    offer = best_offer(sources.of(request), request, 9)
    assert offer is not None and (offer.source, offer.draft_ids) == (Source.HISTORY, [14, 15]) and offer.is_long
    request = make_request(3, [13, 14, 99, 13, 14], 40, tenant="one", speculation=SPECULATION)
    offer = best_offer(sources.of(request), request, 9)
    assert offer is not None and offer.source == Source.LOOKUP
