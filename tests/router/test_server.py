"""The router process: it starts without its shard, drains on the first signal, and exits with its parent."""

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from lorikeet.proto.process import MAX_FILES
from lorikeet.router import server
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.server import SAME_REQUEST_S
from tests.forked import Started
from tests.router import simulated_shard
from tests.router.simulated_shard import SimulatedModel
from tests.router.text.vocabularies import byte_level

pytestmark = pytest.mark.anyio


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Router:
    """A started process."""

    process: Started
    client: httpx.AsyncClient
    log_path: Path

    async def status(self, path: str) -> int | None:
        """The status of the answer, None while the port is closed."""
        try:
            return (await self.client.get(path)).status_code
        except httpx.TransportError:
            return None

    async def until(self, path: str, status: int) -> None:
        async with asyncio.timeout(30):
            while await self.status(path) != status:
                assert self.process.poll() is None, self.log_path.read_text()
                await asyncio.sleep(0.02)

    async def exit_code(self) -> int:
        async with asyncio.timeout(30):
            while (code := self.process.poll()) is None:  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.02)
        return code

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines() if line.startswith("{")]


def settings(folder: Path, **fields: Any) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    values = {
        "model_id": "model",
        "model_path": str(folder),
        "shard_addresses": [f"unix:{folder}/shard.sock"],
        "hostname": "127.0.0.1",
        "port": free_port(),
        "json_output": True,
        **fields,
    }
    path = folder / "router.json"
    path.write_text(json.dumps(values))
    return path


@asynccontextmanager
async def router(folder: Path, **fields: Any) -> AsyncIterator[Router]:
    path = settings(folder, **fields)
    log_path = folder / "router.log"
    with log_path.open("wb") as log:
        process = Started("lorikeet.router", str(path), environment=os.environ, output=log.fileno())
    try:
        url = f"http://127.0.0.1:{json.loads(path.read_text())['port']}"
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            yield Router(process, client, log_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


@asynccontextmanager
async def shard(folder: Path) -> AsyncIterator[None]:
    model = SimulatedModel(token_ids=tuple(range(200, 240)))
    server, _, steps = await simulated_shard.start(f"unix:{folder}/shard.sock", model)
    yield
    steps.cancel()
    await server.stop(0)


def body(num_tokens: int) -> dict[str, Any]:
    return {"inputs": "the fox", "parameters": {"max_new_tokens": num_tokens, "details": True}}


async def test_it_is_live_at_start_and_ready_with_its_shard(tmp_path: Path) -> None:
    async with router(tmp_path, recovery_timeout_s=2.0) as started:
        await started.until("/health", 503)
        assert (await started.client.post("/generate", json=body(1))).status_code == 503
        async with shard(tmp_path):
            await started.until("/ready", 200)
            await started.until("/health", 200)
            answer = await started.client.post("/generate", json=body(5), headers={"x-request-id": "mine"})
            assert answer.json()["details"]["generated_tokens"] == 5
        await started.until("/ready", 503)
        assert await started.status("/health") == 200  # the shard may come back
        await started.until("/health", 503)
        started.process.send_signal(signal.SIGTERM)
        assert await started.exit_code() == 0
        lines = [event for event in started.events() if event.get("request_id") == "mine"]
        assert len(lines) == 1
        assert "the fox" not in started.log_path.read_text()


async def test_the_first_signal_drains(tmp_path: Path) -> None:
    async with shard(tmp_path), router(tmp_path) as started:
        await started.until("/ready", 200)
        running = asyncio.create_task(started.client.post("/generate", json=body(200)))
        await asyncio.sleep(0.3)
        started.process.send_signal(signal.SIGTERM)
        await started.until("/ready", 503)
        assert await started.status("/startup") == 503
        refused = await started.client.post("/generate", json=body(1))
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert (await running).json()["details"]["generated_tokens"] == 200
        assert await started.exit_code() == 0


@pytest.mark.long
async def test_requests_that_outlast_the_drain_get_an_error_event(tmp_path: Path) -> None:
    async with shard(tmp_path), router(tmp_path, drain_timeout_s=0.3) as started:
        await started.until("/ready", 200)
        running = asyncio.create_task(started.client.post("/generate_stream", json=body(4000)))
        await asyncio.sleep(0.3)
        started.process.send_signal(signal.SIGTERM)
        last = (await running).text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error_type"] == "shutting_down"
        assert await started.exit_code() == 0


@pytest.mark.long
async def test_the_second_signal_exits_at_once(tmp_path: Path) -> None:
    async with shard(tmp_path), router(tmp_path) as started:
        await started.until("/ready", 200)
        running = asyncio.create_task(started.client.post("/generate", json=body(4000)))
        await asyncio.sleep(0.3)
        started.process.send_signal(signal.SIGTERM)
        await started.until("/ready", 503)
        await asyncio.sleep(SAME_REQUEST_S)
        started.process.send_signal(signal.SIGTERM)
        assert await started.exit_code() == 1
        with pytest.raises(httpx.TransportError):
            await running


@pytest.mark.long
@pytest.mark.parametrize("pause_s", [0.0, 2 * SAME_REQUEST_S], ids=["of one moment", "under a parent"])
async def test_repeated_signals_that_do_not_exit_at_once(tmp_path: Path, pause_s: float) -> None:
    parent = {"parent_pid": os.getpid()} if pause_s else {}
    async with shard(tmp_path), router(tmp_path, **parent) as started:
        await started.until("/ready", 200)
        running = asyncio.create_task(started.client.post("/generate", json=body(600)))
        await asyncio.sleep(0.3)
        started.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(pause_s)
        started.process.send_signal(signal.SIGINT)
        assert (await running).json()["details"]["generated_tokens"] == 600
        assert await started.exit_code() == 0


def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """A parent that starts a router and is killed at once."""
    path = tmp_path / "router.json"
    script = (
        "import json, os, subprocess, sys, time\n"
        f"path = {str(path)!r}\n"
        "values = json.loads(open(path).read())\n"
        "values['parent_pid'] = os.getpid()\n"
        "open(path, 'w').write(json.dumps(values))\n"
        "print(subprocess.Popen([sys.executable, '-m', 'lorikeet.router', path]).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    settings(tmp_path)
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    port = json.loads(path.read_text())["port"]
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 30
    while _is_running(pid):
        assert time.monotonic() < end, "the router lives on"
        time.sleep(0.05)


def run_router(path: Path) -> tuple[int, str]:
    """Its exit code and output."""
    output = path.with_suffix(".log")
    with output.open("wb") as file:
        code = Started("lorikeet.router", str(path), environment=os.environ, output=file.fileno()).wait(60)
    return code, output.read_text()


def _is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    os.kill(pid, 0)
    return state != "Z"


def test_a_router_imports_only_what_every_server_needs(tmp_path: Path) -> None:
    """Not even with its routes: those that compute with vectors import numpy when they are called, and a server without
    traces needs no exporter.
    """
    program = (
        "import sys; import lorikeet.router.server; from lorikeet.router.api.app import _generating; "
        "from unittest.mock import MagicMock; assert '/v1/embeddings' in _generating(MagicMock()); "
        "print(*sorted({'grpc_reflection', 'numpy', 'opentelemetry.sdk', 'scipy', 'torch', 'transformers'} & "
        "sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "\n"


def test_wrong_settings_are_one_sentence(tmp_path: Path) -> None:
    path = settings(tmp_path, prot=1)
    assert run_router(path) == (2, "router: unknown RouterConfig fields: prot\n")


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = settings(tmp_path, port=taken.getsockname()[1], json_output=False)
        code, output = run_router(path)
    assert code == 1
    assert "can't listen on 127.0.0.1" in output.splitlines()[-1]


@pytest.mark.long
async def test_exhausted_files_are_logged_once_and_end(tmp_path: Path) -> None:
    async with shard(tmp_path), router(tmp_path) as started:
        await started.until("/ready", 200)
        limits = resource.prlimit(started.process.pid, resource.RLIMIT_NOFILE)
        assert limits[0] == min(limits[1], MAX_FILES)
        num_open = len(os.listdir(f"/proc/{started.process.pid}/fd"))
        resource.prlimit(started.process.pid, resource.RLIMIT_NOFILE, (num_open + 20, limits[1]))
        port = httpx.URL(started.client.base_url).port
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        async with asyncio.timeout(20):
            while "file_descriptors_exhausted" not in started.log_path.read_text():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.1)
        for client in clients:
            client.close()
        await started.until("/ready", 200)
        events = [event["event"] for event in started.events()]
        assert events.count("file_descriptors_exhausted") == 1


class OverTime(Exception):
    """The end of a test's time."""


async def test_memory_is_returned_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again later, since what is kept for a while is freed later; the time is a number of pauses."""
    metrics, dispatcher, returned, now = Metrics(), SimpleNamespace(num_active=0), list[int](), 0
    cycle = type("Cycle", (), {})()
    alive = weakref.ref(cycle)

    async def pause(seconds: float) -> None:
        nonlocal now, cycle
        now += 1
        if now == 3:
            metrics.request_arrived()
            dispatcher.num_active = 1
        if now == 6:
            dispatcher.num_active = 0
            cycle.itself = cycle
            del cycle
        if now == 22:
            metrics.request_arrived()
        if now == 28:
            raise OverTime

    monkeypatch.setattr(server, "asyncio", SimpleNamespace(sleep=pause, to_thread=asyncio.to_thread))
    monkeypatch.setattr(server, "return_freed_memory", lambda: returned.append(now))
    gc.disable()
    try:
        with pytest.raises(OverTime):
            await server.return_memory(metrics, cast(Any, dispatcher))
    finally:
        gc.enable()
    assert alive() is None, "an error and the frames that it passed refer to each other"
    assert returned == [6, 7, 9, 13, 21, 23, 24, 26]
