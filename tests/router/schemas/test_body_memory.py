"""The budget of all request bodies: who waits, who is rejected, and what is given back."""

import asyncio
import subprocess
import sys

import pytest

from lorikeet.router.errors import BodyMemoryFull, BodyTooDetailed
from lorikeet.router.schemas import body
from lorikeet.router.schemas.body import MAX_WAITING_PER_CALLER, SETTLED_BYTES, SMALL_BYTES, BodyMemory

pytestmark = pytest.mark.anyio

MIB = 1 << 20


async def test_a_caller_holds_at_most_a_quarter() -> None:
    memory = BodyMemory(64 * MIB, max_wait_s=0.05)
    first = memory.body("a")
    await first.resize(10 * MIB)
    with pytest.raises(BodyMemoryFull):
        await memory.body("a").resize(10 * MIB)
    await memory.body("b").resize(10 * MIB)
    with pytest.raises(BodyTooDetailed):
        await memory.body("c").resize(15 * MIB)
    first.shrink(0)
    await memory.body("a").resize(14 * MIB)
    for _ in range(32):
        await memory.body("a").resize(SMALL_BYTES)
    with pytest.raises(BodyMemoryFull):
        await memory.body("a").resize(SMALL_BYTES)
    assert (memory.num_used, memory.num_waiting) == (26 * MIB, 0)


async def test_small_bodies_have_room_of_their_own() -> None:
    memory = BodyMemory(64 * MIB, max_wait_s=0.05)
    for caller in "abcd":
        await memory.body(caller).resize(14 * MIB)
    with pytest.raises(BodyMemoryFull):
        await memory.body("e").resize(1 * MIB)
    small = [memory.body("f") for _ in range(100)]
    for reservation in small:
        await reservation.resize(SMALL_BYTES)


async def test_a_body_waits_until_there_is_room() -> None:
    memory = BodyMemory(64 * MIB)
    first = memory.body("a")
    await first.resize(14 * MIB)
    large, short = memory.body("a"), memory.body("a")
    waiting = [
        asyncio.create_task(reservation.resize(size)) for reservation, size in ((large, 12 * MIB), (short, 4 * MIB))
    ]
    await asyncio.sleep(0)
    assert memory.num_waiting == 2
    first.shrink(9 * MIB)
    await waiting[1]
    assert not waiting[0].done(), "a body that fits does not wait for one that doesn't"
    first.shrink(0)
    short.shrink(0)
    await waiting[0]
    assert memory.num_used == 12 * MIB


async def test_a_caller_has_a_limited_number_of_waiting_bodies() -> None:
    memory = BodyMemory(64 * MIB)
    await memory.body("a").resize(14 * MIB)
    waiting = [asyncio.create_task(memory.body("a").resize(MIB)) for _ in range(MAX_WAITING_PER_CALLER)]
    await asyncio.sleep(0)
    with pytest.raises(BodyMemoryFull):
        await memory.body("a").resize(MIB)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (memory.num_used, memory.num_waiting) == (14 * MIB, 0)


async def test_a_body_that_is_cancelled_as_it_gets_room_gives_it_back() -> None:
    memory = BodyMemory(64 * MIB)
    first = memory.body("a")
    await first.resize(14 * MIB)
    waiting = asyncio.create_task(memory.body("a").resize(MIB))
    await asyncio.sleep(0)
    first.shrink(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert memory.num_used == 0


async def test_a_validated_request_counts_with_its_text_alone() -> None:
    memory = BodyMemory(64 * MIB)
    for text, kept in ((SETTLED_BYTES, 0), (SETTLED_BYTES + 1, SETTLED_BYTES + 1)):
        charge = memory.body("a")
        await charge.resize(8 * MIB)
        charge.num_text = text
        charge.settle()
        assert charge.size == kept
        charge.shrink(0)


async def test_memory_of_large_bodies_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all that is freed within some time; small bodies return none."""
    returned = asyncio.Event()
    num_returned = 0

    def return_freed_memory() -> None:
        nonlocal num_returned
        num_returned += 1
        loop.call_soon_threadsafe(returned.set)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(body, "return_freed_memory", return_freed_memory)
    monkeypatch.setattr(body, "RETURN_AFTER_S", 0.05)
    memory = BodyMemory(64 * MIB)
    for size, number in ((SMALL_BYTES, 1000), (8 * MIB, 1)):
        for _ in range(number):
            charge = memory.body("a")
            await charge.resize(size)
            charge.shrink(0)
    await asyncio.sleep(0.2)
    assert not num_returned
    for caller in "abc":
        charge = memory.body(caller)
        await charge.resize(8 * MIB)
        charge.shrink(0)
    await returned.wait()
    await asyncio.sleep(0.2)
    assert num_returned == 1


FREED_PIECES = """
import resource
from pathlib import Path
from lorikeet.proto.process import return_freed_memory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

pieces = [b"x" * (60_000 + number % 7) for number in range(1500)]
kept = pieces[::50]
del pieces
before = resident_bytes()
if return_freed_memory():
    returned = before - resident_bytes()
    assert returned > 50_000_000, returned
assert len(kept) == 30
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")
def test_freed_pieces_between_others_are_returned() -> None:
    """What `return_freed_memory` does, with pieces of bodies as they arrive. In a process of its own: whatever else a
    process has freed changes which pages the pieces lie in.
    """
    subprocess.run([sys.executable, "-c", FREED_PIECES], check=True, timeout=60)
