"""The operator's file of receipts: a line per finished text, with hashes instead of tokens, also at shutdown."""

import asyncio
import json
import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from lorikeet.launcher.cli.replay import SavedReceipt
from lorikeet.router.config import RouterConfig
from lorikeet.router.receipts import Receipts
from lorikeet.router.server import RouterServer
from tests.router.api.routes.test_native import generate
from tests.router.api.routes.test_openai import COMPLETION
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio


async def lines(server: Serving, path: Path, num_lines: int) -> list[dict[str, Any]]:
    """The lines of the file, once there are `num_lines`."""
    await server.idle()

    def text() -> str:
        return path.read_text()

    await server.shard.until(lambda: text().count("\n") >= num_lines)
    return [json.loads(line) for line in text().splitlines()]


async def test_every_finished_text_has_a_line_without_tokens(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    path.write_text('{"of": "an earlier run"}\n')
    async with serving(tmp_path, receipts_path=str(path), draft_model_id="test/draft") as server:
        server.says("canary")
        whole = (await generate(server, "secret", max_new_tokens=5, receipt=True))["receipt"]
        await server.events("/generate_stream", {"inputs": "secret", "parameters": {"max_new_tokens": 5}})
        await server.client.post("/predict", json={"prompt": "secret", "max_new_tokens": 5})
        await server.client.post("/v1/completions", json={**COMPLETION, "n": 2, "seed": 5})
        # none of these is a text that could be reproduced
        await generate(server, max_new_tokens=5, speculative_verify="rejection")
        await server.client.get("/startup")
        await server.client.post("/v1/completions", json={**COMPLETION, "max_tokens": 0, "echo": True, "logprobs": 0})
        refused = await server.client.post("/generate", json={"inputs": "", "parameters": {}})
        assert refused.status_code == 422
        server.says("ab", error="broken")
        await server.client.post("/generate", json={"inputs": "Hi"})
        server.says("the end")
        await generate(server, max_new_tokens=9, stop=["e"])
        logged = await lines(server, path, 7)
    first, *rest = logged
    assert first == {"of": "an earlier run"} and len(rest) == 6
    del whole["prompt"]["token_ids"], whole["output"]["token_ids"]
    assert rest[0] == whole
    assert [line["parameters"]["seed"] for line in rest[3:5]] == [5, 6]
    assert {SavedReceipt.read(line).values["base_digest"] for line in rest} == {server.shard.base_digest}
    assert rest[-1]["output"]["finish_reason"] == "stop_sequence"
    assert '"token_ids"' not in path.read_text()


async def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    async with serving(tmp_path, receipts_path=str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_file_that_cannot_be_opened_is_an_error_at_start(tmp_path: Path) -> None:
    config = RouterConfig("m", str(tmp_path), ("x",), receipts_path=str(tmp_path / "absent" / "file"))
    with pytest.raises(OSError, match=r"can't write receipts to .*: No such file"):
        Receipts(config, "", [])


async def test_queued_lines_are_written_on_close(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    async with serving(tmp_path, receipts_path=str(path)) as server:
        server.says("ab")
        await asyncio.gather(*(generate(server, max_new_tokens=2) for _ in range(20)))
        await server.service.receipts.close()
        assert path.read_text().count("\n") == 20


async def test_lost_lines_are_logged_and_requests_answered(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(tmp_path, receipts_path="/dev/full") as server:
        server.says("ab")
        for _ in range(3):
            assert (await generate(server, max_new_tokens=2))["generated_text"] == "ab"
        await server.service.receipts.close()
    printed = capfd.readouterr()
    first, last = [line for line in (printed.out + printed.err).splitlines() if "receipts_not_written" in line]
    assert os.strerror(28) in first and "num_lost=3" in re.sub(r"\x1b\[\d*m", "", last)


async def test_a_torn_line_is_ended_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, room = tmp_path / "receipts.jsonl", [1 << 20]
    write = os.write

    def limited(descriptor: int, content: memoryview) -> int:
        if not room[0]:
            raise OSError(28, os.strerror(28))
        num_written = write(descriptor, content[: room[0]])
        room[0] -= num_written
        return num_written

    async with serving(tmp_path, receipts_path=str(path)) as server:
        monkeypatch.setattr("lorikeet.router.usage_log.os.write", limited)
        server.says("ab")
        for max_bytes, num_lines in ((1 << 20, 1), (20, 1), (0, 1), (1 << 20, 3)):
            room[0] = max_bytes
            await generate(server, max_new_tokens=2)
            await server.shard.until(lambda: not server.service.receipts.is_writing)
            assert path.read_text().count("\n") == num_lines
        monkeypatch.undo()
    whole, cut, again = path.read_text().splitlines()
    assert len(cut) == 20 and json.loads(whole).keys() == json.loads(again).keys()
    printed = capfd.readouterr()
    assert "receipts_written_again" in printed.out + printed.err


async def test_a_file_that_was_moved_away_is_opened_again(tmp_path: Path) -> None:
    """By the handler of SIGHUP, which reopens every log."""
    path, moved, usage = tmp_path / "receipts.jsonl", tmp_path / "receipts.1", tmp_path / "usage.jsonl"
    async with serving(tmp_path, receipts_path=str(path), usage_log=str(usage)) as server:
        server.says("canary")
        await generate(server, "Hi", max_new_tokens=5)
        await lines(server, path, 1)
        path.rename(moved)
        usage.rename(tmp_path / "usage.1")
        router = RouterServer.__new__(RouterServer)
        router._config = RouterConfig("m", str(tmp_path), ("x",), receipts_path=str(path), usage_log=str(usage))
        router._reload_files(server.service)
        await server.shard.until(lambda: path.exists() and usage.exists())
        await generate(server, "Hi", max_new_tokens=5)
        assert len(await lines(server, path, 1)) == 1 and moved.read_text().count("\n") == 1
        server.service.receipts.reopen()
        await server.shard.until(lambda: not server.service.receipts.is_writing)


async def test_receipts_alone_are_reopened_by_a_signal(tmp_path: Path) -> None:
    handled: list[int] = []

    class Loop:
        def add_signal_handler(self, number: int, *_: object) -> None:
            handled.append(number)

    router = RouterServer.__new__(RouterServer)
    router._config = RouterConfig("m", str(tmp_path), ("x",), receipts_path=str(tmp_path / "receipts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lorikeet.router.server.asyncio.get_running_loop", Loop)
        router._handle_signals(None)  # type: ignore[arg-type]
    assert signal.SIGHUP in handled
