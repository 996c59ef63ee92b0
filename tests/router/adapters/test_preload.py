"""The preloader as a task: it ends when it is cancelled, whatever else happens at that moment."""

import asyncio

import pytest

from lorikeet.adapters.keys import Keys
from lorikeet.router.adapters.preload import AdapterPreloader
from lorikeet.router.adapters.selection import Directory, Selection
from lorikeet.router.config import RouterConfig


async def test_a_change_during_cancellation_does_not_prevent_it() -> None:
    config = RouterConfig("model", "", ("unix:none",))
    directory = Directory(config)
    preloader = AdapterPreloader(Selection(config, None, directory, Keys()), None)  # type: ignore[arg-type]  # nothing is pinned

    async def incomplete() -> bool:
        return False  # so that it waits with a timeout: only such a wait could swallow the cancellation

    preloader._reconcile = incomplete  # type: ignore[method-assign]
    running = asyncio.create_task(preloader.run())
    await preloader.settled.wait()
    for _ in range(5):
        await asyncio.sleep(0)  # now it waits for changes
    for changed in directory.on_change:
        changed()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await running
    assert running.cancelled()
