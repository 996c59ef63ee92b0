"""The client of the adapter loader: a call that cannot be sent fails alone."""

import asyncio
from pathlib import Path

import pytest

from lorikeet.adapters.errors import AdapterInvalid
from lorikeet.router.adapters.loading import MAX_LINE_BYTES, LoaderClient
from tests.router.scripted_loader import ScriptedLoader

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("token", ["t" * MAX_LINE_BYTES, "\ud800"])
async def test_a_call_that_cannot_be_sent_fails_alone(tmp_path: Path, token: str) -> None:
    async with ScriptedLoader(tmp_path) as loader:
        loader.may_answer.clear()
        client = LoaderClient(loader.address)
        running = asyncio.create_task(client.run())
        other = client.ask({"fetch": {"id": "other"}, "token": None})
        early = client.ask({"fetch": {"id": "early"}, "token": token})  # before the connection
        with pytest.raises(AdapterInvalid):
            await early.answer
        with pytest.raises(AdapterInvalid):
            await client.ask({"fetch": {"id": "late"}, "token": token}).answer
        loader.may_answer.set()
        assert (await other.answer)["rank"] == 8
        assert [call["fetch"]["id"] for call in loader.asked] == ["other"]
        running.cancel()
