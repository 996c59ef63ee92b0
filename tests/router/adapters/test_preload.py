"""The keeper as a task of the router: it ends when it is told to, whatever else comes at that moment."""

import asyncio

import pytest

from lorikeet.adapters.keys import Keys
from lorikeet.router.adapters.directory import Directory
from lorikeet.router.adapters.preload import AdapterPreloader
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.config import RouterConfig


async def test_a_change_during_cancellation_does_not_prevent_it() -> None:
    config = RouterConfig("model", "", ("unix:none",))
    directory = Directory(config)
    preloader = AdapterPreloader(Selection(config, None, directory, Keys()), None)  # type: ignore[arg-type]  # nothing is pinned

    async def incomplete() -> bool:
        return False  # so that it waits for a while, not for ever: only such a wait can swallow its end

    preloader._reconcile = incomplete  # type: ignore[method-assign]
    running = asyncio.create_task(preloader.run())
    await preloader.settled.wait()
    for _ in range(5):
        await asyncio.sleep(0)  # then it waits for changes
    for changed in directory.on_change:
        changed()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await running
    assert running.cancelled()
