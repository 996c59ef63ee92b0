"""The load of the benchmark of learned heads counts the tokens of all its clients."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.speculation import learning

pytestmark = pytest.mark.anyio


async def test_a_closed_loop_counts_the_tokens_of_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stream(port: int, prompt: str, parameters: dict[str, Any]) -> learning.Streamed:
        await asyncio.sleep(0)
        return learning.Streamed([1] * 10)

    times = iter([100.0, 102.0])
    monkeypatch.setattr(learning, "_stream", stream)
    monkeypatch.setattr(learning, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert await learning._closed_loop(0, ["prompt"] * 40, 4) == 40 * 10 / 2.0
