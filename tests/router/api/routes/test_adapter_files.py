"""Files of adapters that are gone, damaged or removed while requests use them: they are loaded again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.proto import shard_pb2 as pb
from tests.router.api.routes.test_catalogue import bearer
from tests.router.scripted_loader import digest_of
from tests.router.scripted_shard import Script
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

LOST = pb.RequestOutput(finish_reason=pb.FINISH_ERROR, error="its file is gone", retryable=True)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, adapters=True, admin_key_sha256=sha256("admin")) as started:
        started.adapter("one")
        yield started


def loses(server: Serving, times: int, text: str = "abc") -> None:
    """The shard cannot read the adapter of the first requests."""
    answer = Script(server.ids(text))

    def reply(submit: pb.Submit) -> Script:
        if len(server.shard.submits) > times:
            return answer
        server.shard.tell(
            pb.AdapterState(digest=submit.adapter.digest, residency=pb.AdapterState.FAILED, reason="its file is gone")
        )
        return Script([], outputs=[LOST])

    server.shard.answer = reply


def ask(server: Serving, **parameters: Any) -> "asyncio.Task[Any]":
    body = {"inputs": "Hi", "parameters": {"adapter_id": "one", "max_new_tokens": 3, **parameters}}
    return asyncio.create_task(server.client.post("/generate", json=body))


async def test_an_adapter_that_a_shard_cannot_read_is_loaded_again(server: Serving) -> None:
    loses(server, 2)
    answer = await ask(server)
    assert (answer.status_code, answer.json()) == (200, {"generated_text": "abc"})
    assert len(server.loader.asked) == 3 and len(server.shard.submits) == 3
    assert [call for call in server.loader.calls if "verify" in call], "what is damaged is removed"
    assert (await ask(server)).status_code == 200 and len(server.loader.asked) == 3


async def test_an_adapter_that_stays_unreadable_is_unavailable(server: Serving) -> None:
    loses(server, 100)
    answer = await ask(server)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert "loaded 3 times" in answer.json()["error"] and "its file is gone" in answer.json()["error"]
    assert len(server.loader.asked) == 4
    await server.idle()


async def test_a_stream_continues_after_its_adapter_was_loaded_again(server: Serving) -> None:
    ids, digests = server.ids("abcdef"), list[str]()

    def reply(submit: pb.Submit) -> Script:
        digests.append(submit.adapter.digest)
        if len(digests) == 1:
            part = pb.RequestOutput(token_ids=ids[:2], step_ends=b"\1\1", sources=bytes(2))
            state = pb.AdapterState(digest=digests[0], residency=pb.AdapterState.FAILED)
            server.shard.tell(state)
            return Script([], outputs=[part, LOST])
        return Script(ids[2:])

    server.shard.answer = reply
    answer = await ask(server, max_new_tokens=6)
    assert answer.json() == {"generated_text": "abcdef"} and digests[0] == digests[1]


async def unload(server: Serving) -> Any:
    body = {"adapter_id": "one", "disk": True}
    return await server.client.post("/admin/adapters/unload", json=body, headers=bearer("admin"))


async def test_a_file_goes_when_its_last_reader_has_gone(server: Serving) -> None:
    server.says("abc", hangs=True)
    first = ask(server)
    await server.shard.until(lambda: len(server.shard.submits) == 1)
    digest = digest_of(server.loader.asked[0])
    removal = asyncio.create_task(unload(server))
    await server.shard.until(lambda: not server.service.admission.loading.num_known)
    server.says("def")
    second = ask(server)
    await server.shard.until(lambda: len(server.loader.asked) == 2)
    await asyncio.sleep(0.1)
    assert not server.loader.forgotten and len(server.shard.submits) == 1, "the first one still reads it"
    server.shard.finished_ids.append(server.shard.submits[0].id)
    first.cancel()
    await server.shard.until(lambda: any(digest in command.unload_digests for command in server.shard.commands))
    assert not server.loader.forgotten
    server.shard.tell(pb.AdapterState(digest=digest, residency=pb.AdapterState.ABSENT))
    assert (await removal).json()["unloaded"] == [digest]
    assert server.loader.forgotten == [digest]
    assert (await second).json() == {"generated_text": "def"}
    order = [name for call in server.loader.calls for name in ("fetch", "forget") if name in call]
    assert order == ["fetch", "fetch", "forget", "fetch"], "whoever came meanwhile had it loaded again"


async def test_an_unload_ends_although_requests_keep_coming(server: Serving) -> None:
    server.says("abc")
    assert (await ask(server)).status_code == 200
    digest = digest_of(server.loader.asked[0])
    removal = asyncio.create_task(
        server.client.post("/admin/adapters/unload", json={"adapter_id": "one"}, headers=bearer("admin"))
    )
    await server.shard.until(lambda: any(digest in command.unload_digests for command in server.shard.commands))
    states = (pb.AdapterState.ABSENT, pb.AdapterState.LOADING)
    server.shard.tell(*(pb.AdapterState(digest=digest, residency=state) for state in states))
    assert (await removal).status_code == 200
