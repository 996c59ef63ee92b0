"""Events of adapters are published in the step in which they happen, because an idle engine has no next step."""

from dataclasses import dataclass

from lorikeet.proto import shard_pb2 as pb
from lorikeet.shard.grpc.codec import write_update
from lorikeet.shard.grpc.streams import AdapterRead, Commands, StreamUpdate
from lorikeet.shard.requests.request import Request
from lorikeet.shard.scheduler.adapter_slots import AdapterSlots, Content, Residency, SlotLimits
from tests.shard.rig import EPOCH, Rig

A, B = "a" * 64, "b" * 64


@dataclass(frozen=True)
class Weights:
    num_bytes: int
    num_heads: int = 0


class Device:
    """Slots that store nothing."""

    def put(self, slot: int, content: Content) -> None: ...

    def clear(self, slot: int) -> None: ...

    def forget(self, digest: str) -> None:
        pass

    def is_ready(self, slot: int) -> bool:
        return True


def make() -> tuple[Rig, list[str]]:
    """A rig with one slot, and the digests requested from its reader."""
    rig, requested = Rig(), list[str]()
    rig.scheduler.adapters = AdapterSlots(SlotLimits(1, 100, 100), Device(), requested.append)
    return rig, requested


def ask(rig: Rig, number: int, digest: str) -> StreamUpdate:
    """A request of one token, until the engine is idle."""
    rig.inbox.put(Commands(EPOCH, submits=[Request((EPOCH, number), [1, 2], 2, 1, adapter_digest=digest)]))
    return drain(rig)


def drain(rig: Rig) -> StreamUpdate:
    update = rig.step()
    while rig.scheduler.running:
        update = rig.step()
    return update


def test_eviction_and_replacement_are_published_together() -> None:
    rig, _ = make()
    for number, digest in enumerate((A, B)):
        rig.inbox.put(Commands(EPOCH, prefetches=[digest]))
        rig.step()
        rig.inbox.put(AdapterRead(digest, Weights(10)))
        rig.step()
        ask(rig, number, digest)
    update = ask(rig, 9, A)
    assert rig.scheduler.is_idle
    assert {digest: state for digest, (state, _) in update.adapters.states.items()} == {
        A: Residency.RESIDENT,
        B: Residency.HOST_MEMORY,
    }


def test_a_deferred_unload_is_published_when_the_last_request_ends() -> None:
    rig, _ = make()
    rig.inbox.put(Commands(EPOCH, prefetches=[A]))
    rig.step()
    rig.inbox.put(AdapterRead(A, Weights(10)))
    rig.inbox.put(Commands(EPOCH, submits=[Request((EPOCH, 1), [1, 2], 2, 2, adapter_digest=A)]))
    rig.step()
    assert rig.scheduler.running
    rig.inbox.put(Commands(EPOCH, unloads=[A]))
    update = drain(rig)
    assert rig.scheduler.is_idle
    assert update.adapters.states[A][0] is Residency.ABSENT


def test_an_unload_is_published_before_the_load_of_a_later_request() -> None:
    """Also where one message says both, so that whoever waits for the unload sees its end."""
    rig, requested = make()
    rig.inbox.put(Commands(EPOCH, prefetches=[A]))
    rig.step()
    rig.inbox.put(AdapterRead(A, Weights(10)))
    rig.inbox.put(Commands(EPOCH, submits=[Request((EPOCH, 1), [1, 2], 2, 2, adapter_digest=A)]))
    rig.step()
    rig.inbox.put(Commands(EPOCH, unloads=[A]))
    later = Request((EPOCH, 2), [1, 2], 2, 1, adapter_digest=A)
    rig.inbox.put(Commands(EPOCH, prefetches=[A], submits=[later]))
    update = rig.step()
    while requested.count(A) < 2:
        update = rig.step()
    (message,) = write_update(update, pb.Heartbeat())
    states = [(state.digest, state.residency) for state in message.adapters]
    assert states == [(A, pb.AdapterState.ABSENT), (A, pb.AdapterState.LOADING)]
