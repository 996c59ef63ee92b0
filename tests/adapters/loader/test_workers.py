"""Workers of callers that are cancelled: none is left, and none is connected to another socket. What reads adapters
ends when nothing is read, and starts again.
"""

import asyncio
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from lorikeet.adapters.errors import LoaderFailed
from lorikeet.adapters.loader import jobs
from lorikeet.adapters.loader.jobs import Jobs
from lorikeet.adapters.loader.workers import WorkerForkServer
from lorikeet.adapters.refs import Pin, SourceKind
from lorikeet.adapters.sources.registry import Sources, SourceSettings
from lorikeet.adapters.store import Store
from lorikeet.proto.children import ForkServer
from lorikeet.proto.process import start_connected
from tests.e2e.launched import ROOT, alive


def test_a_worker_whose_caller_is_cancelled_while_it_is_forked_is_ended() -> None:
    may_fork = threading.Event()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, subprocess.Popen(["sleep", "20"]) as process:

        def fork() -> None:
            message, (descriptor,), _, _ = socket.recv_fds(theirs, 65536, 4)
            assert "fork" in json.loads(message)
            may_fork.wait()
            theirs.send(json.dumps({"pid": process.pid}).encode())
            assert json.loads(theirs.recv(65536)) == {"wait": process.pid}
            theirs.send(json.dumps({"status": process.wait()}).encode())
            os.close(descriptor)

        forking = threading.Thread(target=fork)
        forking.start()
        server = WorkerForkServer(Path("none"))
        server._control = ours
        asyncio.run(cancelled(server, may_fork))
        forking.join()
        assert process.returncode == -9


async def cancelled(server: WorkerForkServer, may_fork: threading.Event) -> None:
    """Ask for a worker, and leave before it is there."""
    call = asyncio.create_task(server.worker(steps_back=False))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    may_fork.set()
    async with asyncio.timeout(10):
        while server._ending:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL: look for `oom`"),
        ("raise SystemExit(3)", "ended with exit code 3: the lines above say why"),
        ("import time; time.sleep(30)", "did not answer within 0.2 s: the machine is busy"),
    ],
    ids=["killed", "ended", "slow"],
)
def test_a_process_that_does_not_start_says_why_and_what_to_do(tmp_path: Path, program: str, said: str) -> None:
    (tmp_path / "program.py").write_text(program)
    server = ForkServer("program", start_s=0.2 if "sleep" in program else 30.0, env={"PYTHONPATH": str(tmp_path)})
    assert asyncio.run(server.start()) == {}
    assert said in server.ending()
    server.close()


class Reading:
    """Jobs, and what reads adapters for them: another process in place of the one that is forked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = WorkerForkServer(Path("none"), preload="somewhere")
        self.base = ("base", "weights", "float32")
        monkeypatch.setattr(self.server, "_forked", lambda preload: self._started())
        monkeypatch.setattr(jobs, "CHECKED_S", 0.2)
        monkeypatch.setattr(jobs, "IDLE_S", 60.0)
        self._folder = folder

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        module = "tests.adapters.loader.scripted_reader"
        return start_connected(module, ",".join(self.base), kind=socket.SOCK_SEQPACKET, cwd=ROOT)

    async def open(self) -> Jobs:
        store = Store(self._folder, 1 << 20, await self.server.base_key())
        return Jobs(store, self.server, Sources(SourceSettings()), 1, 1)

    async def until_it_rests(self) -> None:
        async with asyncio.timeout(30):
            while self.server.is_running:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)


PIN = Pin(SourceKind.LOCAL, "adapter", "0" * 64)


def test_what_reads_adapters_ends_after_checks_and_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its workers nor the loader's own end go with it."""

    async def run() -> None:
        reading = Reading(tmp_path, monkeypatch)
        opened = await reading.open()
        ended = asyncio.create_task(reading.server.ended())
        await reading.until_it_rests()  # nothing was asked since it was opened
        workers = []
        for _ in range(2):
            workers.append((await opened.check(PIN, None))["rank"])
            assert reading.server.is_running
            await reading.until_it_rests()
        async with asyncio.timeout(30):
            while any(map(alive, workers)):  # noqa: ASYNC110 - they are no children of this process
                await asyncio.sleep(0.01)
        assert len(set(workers)) == 2 and not ended.done()
        await opened.check(PIN, None)
        process = reading.server._process
        assert process is not None
        process.kill()
        async with asyncio.timeout(30):
            assert await ended == -9
        opened._rest()

    asyncio.run(run())


def test_what_has_read_an_adapter_stays_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        reading = Reading(tmp_path, monkeypatch)
        opened = await reading.open()
        with opened._at_work(jobs.IDLE_S):
            await asyncio.sleep(0.5)
            assert reading.server.is_running  # a job takes longer than it waits
        await opened.check(PIN, None)
        await asyncio.sleep(0.5)
        assert reading.server.is_running
        await opened.end()
        opened._rest()

    asyncio.run(run())


def test_without_a_preloaded_process_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        reading = Reading(tmp_path, monkeypatch)
        await reading.open()
        reading.server._preload = None
        await asyncio.sleep(0.5)
        assert reading.server.is_running
        reading.server.close()

    asyncio.run(run())


def test_it_does_not_start_again_for_another_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored adapters are for the base that it had."""

    async def run() -> None:
        reading = Reading(tmp_path, monkeypatch)
        opened = await reading.open()
        await reading.until_it_rests()
        reading.base = ("base", "other weights", "float32")
        with pytest.raises(LoaderFailed, match="base model's files have changed"):
            await opened.check(PIN, None)
        reading.base = ("base", "weights", "float32")
        assert (await opened.check(PIN, None))["rank"]
        await opened.end()
        opened._rest()

    asyncio.run(run())
