"""Medusa heads in steps: different numbers of heads, alone, with an adapter or with another's. They draft from
committed rows only, and change no text.
"""

from dataclasses import replace

import pytest

from lorikeet.proto.params import Method, Schedule, Speculation
from lorikeet.shard.grpc.streams import AdapterRead, Commands
from lorikeet.shard.requests.request import FinishReason, Request, Source
from lorikeet.shard.scheduler.adapter_slots import AdapterSlots, SlotLimits
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.engine.test_speculation import SETUPS, assert_equal, mixed_distributions, texts_alone
from tests.shard.grpc.test_adapter_events import Device, Weights
from tests.shard.rig import EPOCH, Rig, Setup, make_request

PLAIN, TWO, FIVE = "a" * 64, "b" * 64, "c" * 64
CONTENTS = {PLAIN: Weights(1), TWO: Weights(1, num_heads=2), FIVE: Weights(1, num_heads=5)}
BROUGHT = ((TWO, ""), (PLAIN, FIVE), ("", TWO), (FIVE, FIVE), (PLAIN, ""), ("", ""))


def make_rig(setup: Setup, num_slots: int = 3) -> Rig:
    """A rig whose reader finds every content at once."""
    rig = Rig(replace(setup, drafts=DraftSettings()))

    def load(digest: str) -> None:
        rig.inbox.put(AdapterRead(digest, CONTENTS.get(digest), "" if digest in CONTENTS else "not there"))

    rig.scheduler.adapters = AdapterSlots(SlotLimits(num_slots, 100, 100), Device(), load)
    return rig


def with_heads(requests: list[Request], method: Method = Method.MEDUSA) -> list[Request]:
    for i, request in enumerate(requests):
        request.adapter_digest, request.heads_digest = BROUGHT[i % len(BROUGHT)]
        num_heads, schedule = (255, 1, 4)[i % 3], list(Schedule)[i % 3]
        request.speculation = Speculation(method, 3 if method is Method.AUTO else 0, num_heads, schedule)
    return requests


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("default", Method.AUTO),
        ("lag 1", Method.MEDUSA),
        ("few pages, lag 1, chunks of 7, no prefixes", Method.MEDUSA),
        pytest.param("default", Method.MEDUSA, marks=pytest.mark.long),
        pytest.param("lag 1", Method.AUTO, marks=pytest.mark.long),
        pytest.param("few pages, lag 1, chunks of 7, no prefixes", Method.AUTO, marks=pytest.mark.long),
        ("lag 1, drafts on the device", Method.AUTO),
        ("few pages, lag 1, drafts on the device, chunks of 7", Method.MEDUSA),
        pytest.param("lag 1, drafts on the device", Method.MEDUSA, marks=pytest.mark.long),
        pytest.param("few pages, lag 1, drafts on the device, chunks of 7", Method.AUTO, marks=pytest.mark.long),
        pytest.param("pages of one token, lag 1, drafts on the device", Method.AUTO, marks=pytest.mark.long),
        pytest.param("pages of one token", Method.MEDUSA, marks=pytest.mark.long),
        pytest.param("pages of one token", Method.AUTO, marks=pytest.mark.long),
    ],
)
def test_every_text_is_what_it_is_without(name: str, method: Method) -> None:
    alone = texts_alone(mixed_distributions())
    requests = with_heads(mixed_distributions(), method)
    rig = make_rig(SETUPS[name])
    outputs = rig.run(*requests)
    for request in requests:
        found = outputs[request.key[1]]
        assert_equal(found, alone[request.key[1]])
        has_heads = any(CONTENTS[digest].num_heads for digest in request.digests)
        assert has_heads or Source.MEDUSA not in found.sources
        assert found.sources.count(Source.MEDUSA) + found.sources.count(Source.LOOKUP) == found.num_accepted
    assert sum(output.sources.count(Source.MEDUSA) for output in outputs.values()) > 5


def test_drafts_are_limited_by_heads_and_by_the_request() -> None:
    cases = {(FIVE, 255): 5, (FIVE, 3): 3, (TWO, 255): 2, (TWO, 4): 2}
    requests = [
        make_request(i, [1, 2, i], 12, heads_digest=digest, speculation=Speculation(Method.MEDUSA, 0, wanted))
        for i, (digest, wanted) in enumerate(cases)
    ]
    rig = make_rig(Setup())
    rig.submit(*requests)
    rig.step(3)  # loading of heads, the prompt, the first drafts
    assert [sum(rig.outputs[i].num_drafted) for i in range(4)] == list(cases.values())


def test_right_heads_take_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.shard.fake_model.WRONG_EVERY", 1000)
    request = make_request(1, [1, 2, 3], 25, heads_digest=FIVE, speculation=Speculation(Method.MEDUSA, 0, 5))
    rig = make_rig(Setup())
    output = rig.run(request)[1]
    assert output.num_drafted == (0, 20, 0, 0, 0) and output.num_accepted == 20
    assert rig.model.num_steps == 1 + 24 // 6


def test_heads_that_fail_to_load_end_the_request() -> None:
    lost = "d" * 64
    rig = make_rig(Setup())
    rig.inbox.put(
        Commands(
            EPOCH,
            submits=[
                make_request(1, [1, 2], 5, heads_digest=lost, speculation=Speculation(Method.MEDUSA, 0, 3)),
                make_request(2, [1, 2], 5, heads_digest=lost),  # which has no drafts, and needs no heads
            ],
        )
    )
    outputs = rig.run()
    assert outputs[1].finish_reason is FinishReason.ERROR and "not there" in outputs[1].error
    assert outputs[2].finish_reason is FinishReason.LENGTH


def test_one_slot_is_too_few_for_an_adapter_and_other_heads() -> None:
    requests = with_heads(
        [make_request(1, [1, 2], 5, adapter_digest=PLAIN, heads_digest=TWO), make_request(2, [1, 2], 5)]
    )
    requests[0].adapter_digest, requests[0].heads_digest = PLAIN, TWO
    outputs = make_rig(Setup(), num_slots=1).run(*requests[:1])
    assert "need 2 slots" in outputs[1].error


def test_an_adapter_and_heads_that_never_fit_together_end_the_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CONTENTS, PLAIN, Weights(60))
    monkeypatch.setitem(CONTENTS, TWO, Weights(50, num_heads=2))
    wanted = Speculation(Method.MEDUSA, 0, 2)
    rig = make_rig(Setup())
    alone = [
        make_request(2, [1, 2], 5, adapter_digest=PLAIN),
        make_request(3, [1, 2], 5, heads_digest=TWO, speculation=wanted),
    ]
    both = [make_request(i, [1, 2], 5, adapter_digest=PLAIN, heads_digest=TWO, speculation=wanted) for i in (1, 4)]
    outputs = rig.run(both[0], *alone)
    assert "take 110 bytes; 100 are kept" in outputs[1].error and not outputs[1].retryable
    assert outputs[2].finish_reason is outputs[3].finish_reason is FinishReason.LENGTH
    rig.submit(both[1])  # the sizes are known by now
    rig.step()
    assert "take 110 bytes" in rig.outputs[4].error
