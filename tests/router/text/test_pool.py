"""Work on texts: callers take turns, long texts do not delay short ones, and nobody's work is done for nothing."""

import asyncio
import threading

import pytest

from lorikeet.router.text.tokenizer import LONG_TEXT, TextPool

pytestmark = pytest.mark.anyio


async def started(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 20)


async def test_callers_take_turns() -> None:
    pool, order = TextPool(1), list[str]()
    running, may_end = threading.Event(), threading.Event()
    first = asyncio.create_task(pool.run(lambda: (running.set(), may_end.wait(20)), "flood", 10))
    await started(running)
    flood = [asyncio.create_task(pool.run(lambda: order.append("flood"), "flood", 10)) for _ in range(50)]
    await asyncio.sleep(0)
    other = asyncio.create_task(pool.run(lambda: order.append("other"), "other", 10))
    await asyncio.sleep(0)
    assert pool.num_pending == 52
    may_end.set()
    await asyncio.gather(first, other, *flood)
    assert "other" in order[:2]
    assert pool.num_pending == 0
    pool.close()


async def test_a_long_text_does_not_delay_short_ones() -> None:
    pool, may_end = TextPool(1), threading.Event()
    long = [asyncio.create_task(pool.run(lambda: may_end.wait(20), "a", LONG_TEXT)) for _ in range(3)]
    async with asyncio.timeout(10):
        assert await pool.run(lambda: "short", "a", 5) == "short"
    may_end.set()
    await asyncio.gather(*long)
    pool.close()


async def test_abandoned_work_is_not_started() -> None:
    pool, done = TextPool(1), list[int]()
    running, may_end = threading.Event(), threading.Event()
    first = asyncio.create_task(pool.run(lambda: (running.set(), may_end.wait(20)), "a", 1))
    await started(running)
    left = [asyncio.create_task(pool.run(lambda: done.append(1), "a", 1)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in (first, *left):
        task.cancel()
    await asyncio.gather(first, *left, return_exceptions=True)
    may_end.set()
    assert await pool.run(lambda: list(done), "b", 1) == []
    assert pool.num_pending == 0
    pool.close()


async def test_errors_reach_the_caller() -> None:
    pool = TextPool(1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0, "a", 1)
    pool.close()
