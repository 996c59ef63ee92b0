"""Workers of callers that are cancelled: none is left, and none is connected to another socket."""

import asyncio
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from lorikeet.adapters.loader.workers import WorkerForkServer
from lorikeet.proto.children import ForkServer


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
