"""Cached rights: per caller, for how long, and what is valid while a source does not answer."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from lorikeet.adapters.errors import AdapterError, AdapterNotAllowed, AdapterNotFound, SourceUnreachable
from lorikeet.adapters.refs import Pin, Ref, SourceKind
from lorikeet.adapters.sources.base import SMALL_NAMES, Resolved, Within, unbounded
from lorikeet.adapters.sources.listed import LocalSource
from lorikeet.adapters.sources.registry import LOCAL_S, LOOKUP_S, MAX_ASKED, Rights, rejected_versions

pytestmark = pytest.mark.anyio

PRIVATE = Ref(SourceKind.HUB, "a/private")
PUBLIC = Ref(SourceKind.HUB, "a/public")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Hub:
    """A source whose rules the test sets; it is its own registry."""

    owners: set[str] = field(default_factory=lambda: {"right"})
    is_up: bool = True
    commit: str = "1"
    num_asked: int = 0
    gate: asyncio.Event | None = None

    def __getitem__(self, source: SourceKind) -> "Hub":
        return self

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        self.num_asked += 1
        if self.gate is not None:
            await self.gate.wait()
        if not self.is_up:
            raise SourceUnreachable("no answer")
        if ref == PUBLIC:
            return Resolved(Pin(SourceKind.HUB, ref.id, self.commit), is_public=True)
        if token in self.owners:
            return Resolved(Pin(SourceKind.HUB, ref.id, self.commit), is_public=False)
        raise AdapterNotAllowed("no right", status=401) if token is None else AdapterNotFound("not found")

    async def small_files(
        self, pin: Pin, token: str | None, names: frozenset[str] = SMALL_NAMES, max_bytes: int = 1 << 20
    ) -> dict[str, bytes]:
        return {}

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within = unbounded) -> Path:
        return folder

    async def close(self) -> None:
        pass


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Case:
    hub: Hub
    clock: Clock
    rights: Rights


@pytest.fixture
def case() -> Case:
    source, clock = Hub(), Clock()
    registry: Any = source
    return Case(source, clock, Rights(registry, ttl_s=60, stale_s=900, clock=clock))


async def test_an_answer_is_cached_for_a_minute(case: Case) -> None:
    for seconds, num_asked in ((0, 1), (59, 1), (61, 2)):
        case.clock.now = seconds
        assert (await case.rights.resolve(PRIVATE, "right")).pin.revision == "1"
        assert case.hub.num_asked == num_asked


async def test_a_rejection_is_cached_too(case: Case) -> None:
    for seconds, num_asked in ((0, 1), (59, 1), (61, 2)):
        case.clock.now = seconds
        with pytest.raises(AdapterNotFound):
            await case.rights.resolve(PRIVATE, "wrong")
        assert case.hub.num_asked == num_asked
    with pytest.raises(AdapterNotAllowed) as caught:
        await case.rights.resolve(PRIVATE, None)
    assert caught.value.status == 401
    with pytest.raises(AdapterNotAllowed) as caught:
        await case.rights.resolve(PRIVATE, None)
    assert caught.value.status == 401


async def test_a_version_that_cannot_be_served_is_looked_up_again(case: Case) -> None:
    rejected = rejected_versions()
    registry: Any = case.hub
    rights = Rights(registry, ttl_s=60, stale_s=900, clock=case.clock, rejected=rejected)
    pin = (await rights.resolve(PUBLIC, None)).pin
    for seconds, num_asked in ((1.0, 1), (LOOKUP_S, 2), (LOOKUP_S + 1, 2), (2 * LOOKUP_S, 3)):
        case.clock.now = seconds
        rejected.put(pin, seconds)
        assert (await rights.resolve(PUBLIC, None)).pin == pin
        assert case.hub.num_asked == num_asked, "at most once in the time"
    case.hub.commit = "2"
    case.clock.now = 3 * LOOKUP_S
    assert (await rights.resolve(PUBLIC, None)).pin.revision == "2"
    case.clock.now = 5 * LOOKUP_S
    await rights.resolve(PUBLIC, None)
    assert case.hub.num_asked == 4, "the new version is cached"


async def test_a_local_folder_that_was_replaced_is_served_after_a_second(tmp_path: Path) -> None:
    clock, registry = Clock(), Registry(LocalSource([tmp_path], 1000))
    rights = Rights(cast(Any, registry), ttl_s=60, clock=clock)
    (tmp_path / "a").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "a" / name).write_text("old")
    old = (await rights.resolve(Ref(SourceKind.LOCAL, "a"), None)).pin
    (tmp_path / "a" / "adapter_model.safetensors").write_text("new")
    clock.now = LOCAL_S / 2
    assert (await rights.resolve(Ref(SourceKind.LOCAL, "a"), None)).pin == old
    clock.now = LOCAL_S
    assert (await rights.resolve(Ref(SourceKind.LOCAL, "a"), None)).pin != old


async def test_local_folders_are_looked_up_at_once(tmp_path: Path) -> None:
    """Neither what is missing nor what cannot be served is cached."""
    clock, rejected, registry = Clock(), rejected_versions(), Registry(LocalSource([tmp_path], 1000))
    rights = Rights(cast(Any, registry), clock=clock, rejected=rejected)
    ref = Ref(SourceKind.LOCAL, "a")
    for _ in range(2):
        with pytest.raises(AdapterNotFound):
            await rights.resolve(ref, None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    pin = (await rights.resolve(ref, None)).pin
    (tmp_path / "a" / "adapter_model.safetensors").write_text("weights")
    assert (await rights.resolve(ref, None)).pin == pin, "cached"
    rejected.put(pin, clock.now)
    assert (await rights.resolve(ref, None)).pin != pin


class Registry:
    """Sources of which all are one."""

    def __init__(self, source: LocalSource) -> None:
        self._source = source

    def __getitem__(self, source: SourceKind) -> LocalSource:
        return self._source


async def test_rights_are_cached_per_caller(case: Case) -> None:
    await case.rights.resolve(PRIVATE, "right")
    for token in ("wrong", None, ""):
        with pytest.raises(AdapterError):
            await case.rights.resolve(PRIVATE, token)
    case.hub.is_up = False
    case.clock.now = 100
    assert await case.rights.resolve(PRIVATE, "right")
    for token in ("wrong", None, "third"):
        with pytest.raises((SourceUnreachable, AdapterNotFound, AdapterNotAllowed)):
            await case.rights.resolve(PRIVATE, token)


async def test_a_public_adapter_is_resolved_once_for_all_callers(case: Case) -> None:
    for token in (None, "a", "b"):
        await case.rights.resolve(PUBLIC, token)
    assert case.hub.num_asked == 1


async def test_without_the_source(case: Case) -> None:
    await case.rights.resolve(PUBLIC, None)
    await case.rights.resolve(PRIVATE, "right")
    case.hub.is_up = False
    case.clock.now = 900
    assert await case.rights.resolve(PRIVATE, "right")
    case.clock.now = 901
    with pytest.raises(SourceUnreachable) as caught:
        await case.rights.resolve(PRIVATE, "right")
    assert (caught.value.status, caught.value.retry_after) == (503, 5.0)
    case.clock.now = 1e6
    assert await case.rights.resolve(PUBLIC, "anyone")


async def test_a_revoked_right_is_not_restored_by_an_outage(case: Case) -> None:
    await case.rights.resolve(PRIVATE, "right")
    case.hub.owners.clear()
    case.clock.now = 61
    with pytest.raises(AdapterNotFound):
        await case.rights.resolve(PRIVATE, "right")
    case.hub.is_up = False
    case.clock.now = 200
    with pytest.raises(SourceUnreachable):
        await case.rights.resolve(PRIVATE, "right")


async def test_concurrent_callers_share_one_request_and_may_cancel(case: Case) -> None:
    case.hub.gate = asyncio.Event()
    tasks = [asyncio.create_task(case.rights.resolve(PRIVATE, "right")) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    case.hub.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert case.hub.num_asked == 1
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(isinstance(result, Resolved) for result in results[1:])


async def test_forget_clears_the_cache(case: Case) -> None:
    await case.rights.resolve(PUBLIC, None)
    case.hub.commit = "2"
    case.rights.forget(PUBLIC)
    assert (await case.rights.resolve(PUBLIC, None)).pin.revision == "2"


async def test_tokens_are_not_kept(case: Case) -> None:
    await case.rights.resolve(PRIVATE, "right")
    assert "right" not in str(case.rights._answers)


class RightsMachine(RuleBasedStateMachine):
    """Callers, a hub that comes and goes, rights that are given and taken: nobody has what was never theirs lately."""

    def __init__(self) -> None:
        super().__init__()
        self.hub, self.clock = Hub(), Clock()
        registry: Any = self.hub
        self.rights = Rights(registry, ttl_s=60, stale_s=900, clock=self.clock)
        self.loop = asyncio.new_event_loop()
        self.proved: dict[str | None, float] = {}

    @rule(seconds=st.sampled_from([1, 30, 61, 500, 901]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(is_up=st.booleans())
    def switch(self, is_up: bool) -> None:
        self.hub.is_up = is_up

    @rule(token=st.sampled_from(["a", "b"]), has=st.booleans())
    def entitle(self, token: str, has: bool) -> None:
        (self.hub.owners.add if has else self.hub.owners.discard)(token)

    @rule(token=st.sampled_from(["a", "b", None]))
    def ask(self, token: str | None) -> None:
        before = self.hub.num_asked
        try:
            self.loop.run_until_complete(self.rights.resolve(PRIVATE, token))
        except (AdapterNotAllowed, AdapterNotFound):
            self.proved.pop(token, None)
        except SourceUnreachable:
            assert not self.hub.is_up
            assert self.clock.now - self.proved.get(token, -1e9) > 900
        else:
            if self.hub.num_asked > before and self.hub.is_up:
                assert token in self.hub.owners
                self.proved[token] = self.clock.now
            assert token is not None
            assert self.clock.now - self.proved[token] <= 900

    def teardown(self) -> None:
        self.loop.close()


def test_rights_under_random_events() -> None:
    run_state_machine_as_test(RightsMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


async def test_a_caller_does_not_take_all_of_a_slow_source() -> None:
    hub = Hub(gate=asyncio.Event())
    rights = Rights(cast(Any, hub))
    refs = [Ref(SourceKind.HUB, f"a/{number}") for number in range(100)]
    flood = [asyncio.create_task(rights.resolve(ref, "right", "flood")) for ref in refs]
    while hub.num_asked < MAX_ASKED:  # noqa: ASYNC110 - tasks begin at the next turns of the loop
        await asyncio.sleep(0)
    others = [asyncio.create_task(rights.resolve(PUBLIC, None, "another")), *flood]
    operators = asyncio.create_task(rights.resolve(PRIVATE, "right"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert hub.num_asked == MAX_ASKED + 2
    assert hub.gate is not None
    hub.gate.set()
    assert all([(await task).pin.revision == "1" for task in [*others, operators]])
    assert not rights._num_asked and not rights._rooms
