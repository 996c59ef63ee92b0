"""With commit lag 1, requests with drafts that arrive at different times share their passes as with lag 0."""

import random
from dataclasses import dataclass, replace

import pytest

from lorikeet.proto.params import Method, Schedule, Speculation
from lorikeet.shard.grpc.streams import AdapterRead, Output
from lorikeet.shard.requests.request import Request
from lorikeet.shard.scheduler.adapter_slots import AdapterSlots, SlotLimits
from tests.shard.engine.simulated_clock import HOST, Clock, run_staggered
from tests.shard.fake_model import VOCAB_SIZE, DraftModel, generate_alone
from tests.shard.grpc.test_adapter_events import Device, Weights
from tests.shard.rig import Rig, Setup, make_request
from tests.shard.speculation.scripted_drafts import ScriptedDrafts, script_device

HEADS = "b" * 64
CHANCE = 0.85
LOOKUP, MEDUSA = Speculation(Method.LOOKUP, 3), Speculation(Method.MEDUSA, 0, 3)
DRAFT, NONE = Speculation(Method.DRAFT, 3), Speculation()


@dataclass(frozen=True)
class Traffic:
    """Requests that take turns with these kinds of drafts, `interval` passes apart."""

    kinds: tuple[Speculation, ...]
    num_requests: int
    interval: float = 1.4

    def run(
        self, commit_lag: int, drafts_on_device: bool = False, host: float = HOST
    ) -> tuple[Clock, dict[int, Output]]:
        requests = [self._make(i) for i in range(self.num_requests)]
        texts = {i: [*r.token_ids, *generate_alone(r.token_ids, r.max_new_tokens)] for i, r in enumerate(requests)}
        has_draft = any(r.speculation.method is Method.DRAFT for r in requests)
        sources = ScriptedDrafts(max_batch_size=64, has_draft_model=has_draft, texts=texts, chance=CHANCE)
        draft = DraftModel(0.85) if has_draft else None
        rig = Rig(
            Setup(4000, max_running=64, commit_lag=commit_lag, drafts=sources, draft=draft,
                  drafts_on_device=drafts_on_device)
        )  # fmt: skip
        if drafts_on_device:
            script_device(rig, texts, CHANCE)

        def load(digest: str) -> None:
            rig.inbox.put(AdapterRead(digest, Weights(1, num_heads=3)))

        rig.scheduler.adapters = AdapterSlots(SlotLimits(3, 100, 100), Device(), load)
        return run_staggered(rig, requests, self.interval, host)

    def _make(self, number: int) -> Request:
        rng = random.Random(number)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(2, 12))]
        kind = self.kinds[number % len(self.kinds)]
        heads = HEADS if kind.takes_heads else ""
        return make_request(number, prompt, rng.randrange(50, 90), speculation=kind, heads_digest=heads)


def with_auto(kind: Speculation) -> Speculation:
    return replace(kind, schedule=Schedule.AUTO)


KINDS = {
    "lookup": (LOOKUP,),
    "Medusa": (MEDUSA,),
    "draft model": (DRAFT,),
    "lookup and none": (LOOKUP, NONE),
    "all": (LOOKUP, MEDUSA, DRAFT, NONE),
    "lookup, auto": (with_auto(LOOKUP),),
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
def test_requests_that_arrive_one_by_one_share_their_passes(kinds: tuple[Speculation, ...]) -> None:
    assert_as_few_passes(Traffic(kinds, 8))


@pytest.mark.long
@pytest.mark.parametrize("interval", [0.0, 0.6])
@pytest.mark.parametrize("num_requests", [1, 3, 16, 64])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
def test_any_number_of_requests_shares_its_passes(
    kinds: tuple[Speculation, ...], num_requests: int, interval: float
) -> None:
    assert_as_few_passes(Traffic(kinds, num_requests, interval))


ON_DEVICE = {name: KINDS[name] for name in ("lookup", "Medusa", "lookup and none", "lookup, auto")} | {
    "none": (NONE,), "lookup and Medusa": (LOOKUP, MEDUSA)
}  # fmt: skip
"""Kinds of drafts that the device makes."""


@pytest.mark.parametrize("kinds", ON_DEVICE.values(), ids=ON_DEVICE.keys())
def test_with_drafts_on_the_device_the_host_never_waits(kinds: tuple[Speculation, ...]) -> None:
    assert_hides_the_host(Traffic(kinds, 8))


@pytest.mark.long
@pytest.mark.parametrize("interval", [0.0, 0.6])
@pytest.mark.parametrize("num_requests", [1, 3, 16, 64])
@pytest.mark.parametrize("kinds", ON_DEVICE.values(), ids=ON_DEVICE.keys())
def test_any_number_of_requests_hides_the_host(
    kinds: tuple[Speculation, ...], num_requests: int, interval: float
) -> None:
    assert_hides_the_host(Traffic(kinds, num_requests, interval))


def assert_hides_the_host(traffic: Traffic) -> None:
    (plain, expected), (lagging, found) = traffic.run(0), traffic.run(1, drafts_on_device=True)
    assert {i: each.token_ids for i, each in found.items()} == {i: each.token_ids for i, each in expected.items()}
    simple, ideal = traffic.run(1)[0], traffic.run(0, host=0.0)[0]
    print(
        f"time {lagging.busy:.1f}: {lagging.busy / lagging.num_passes:.3f} × {lagging.num_passes} passes; "
        f"lag 0 {plain.busy:.1f}: {plain.num_passes} passes, if the host took no time {ideal.num_passes}; "
        f"drafts of the host {simple.busy:.1f}: {simple.busy / simple.num_passes:.3f} × {simple.num_passes}"
    )
    assert lagging.busy <= plain.busy
    if traffic.kinds[0].schedule is not Schedule.AUTO:  # its widths follow measured times, which differ
        # Passes are shorter than with lag 0: more of them fit between two arrivals. A request that arrives misses the
        # pass that is launched already, and the last one to end is in one pass more.
        assert lagging.num_passes <= 1.05 * ideal.num_passes + 2
    assert lagging.busy <= 1.05 * max(lagging.num_passes, HOST * lagging.num_passes) + 1


def assert_as_few_passes(traffic: Traffic) -> None:
    (plain, expected), (lagging, found) = traffic.run(commit_lag=0), traffic.run(commit_lag=1)
    assert {i: each.token_ids for i, each in found.items()} == {i: each.token_ids for i, each in expected.items()}
    print(f"passes {plain.num_passes} → {lagging.num_passes}, time {plain.busy:.1f} → {lagging.busy:.1f} passes")
    assert lagging.num_passes <= 1.05 * plain.num_passes + 1  # the first tokens of a request may miss a pass
    assert lagging.busy <= 1.05 * plain.busy + 1
