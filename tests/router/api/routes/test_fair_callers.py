"""Callers share a server: a flood of one delays its own requests, not those of another address."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.router.scripted_shard import Script
from tests.router.serving import MODEL_ID, serving

pytestmark = pytest.mark.anyio


async def test_a_flood_of_valid_requests_leaves_room_for_another_address(tmp_path: Path, anyio_backend: str) -> None:
    """The flood fills the server with as many sequences as it takes, beyond what its shard runs."""
    async with serving(tmp_path, max_concurrent_requests=16) as server:
        server.shard.credit_requests = 2
        answer, flooded = server.ids("x"), server.ids("Hi")
        server.shard.answer = lambda submit: Script(answer, hangs=list(submit.prompt_ids) == flooded)
        await server.client.post("/generate", json={"inputs": "Yo"})  # its answer reports the credit
        body = {"model": MODEL_ID, "prompt": "Hi", "n": 2}
        flood = [asyncio.create_task(server.client.post("/v1/completions", json=body)) for _ in range(8)]
        await server.shard.until(lambda: server.dispatcher.num_active == 16)
        assert (await server.client.post("/v1/completions", json=body)).status_code == 429
        transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=server.url, transport=transport, timeout=60) as other:
            assert (await other.post("/generate", json={"inputs": "Yo"})).status_code == 200
        await server.shard.until(lambda: any(task.done() for task in flood))
        [rejected] = [await task for task in flood if task.done()]
        assert rejected.status_code == 429
        assert "retry-after" in rejected.headers
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await server.client.aclose()  # cancelling a request does not always close its connection
        await server.idle()
