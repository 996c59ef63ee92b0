"""`python -m lorikeet.shard` as a real process with a real model: ready, serving, ended by signals or by its parent."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from tests import tiny

TIMEOUT_S = 60.0
ROOT = Path(__file__).parents[3]
NEUTRAL = pb.Sampling(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)
CANARY = [101, 102, 103, 104, 105]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("model"))


def write_config(folder: Path, model: Path, **values: object) -> Path:
    path = folder / "shard.json"
    defaults = {
        "model_id": "tiny",
        "model_path": str(model),
        "listen": f"unix:{folder}/shard.sock",
        "max_total_tokens": 64,
        "num_pages": 8,
        "threads": 1,
        "json_output": True,
    }
    path.write_text(json.dumps(defaults | values))
    return path


def start(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lorikeet.shard", str(config)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def shard(tmp_path: Path, model: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(write_config(tmp_path, model, parent_pid=os.getpid()))
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.fixture
def stub(shard: subprocess.Popen[str], tmp_path: Path) -> Iterator[shard_pb2_grpc.ShardStub]:
    options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
    with grpc.insecure_channel(f"unix:{tmp_path}/shard.sock", options=options) as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        stub = shard_pb2_grpc.ShardStub(channel)
        assert stub.Info(pb.InfoRequest(), timeout=TIMEOUT_S).num_pages == 8
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        yield stub


def submit(max_new_tokens: int) -> pb.Command:
    return pb.Command(submits=[pb.Submit(id=1, prompt_ids=CANARY, max_new_tokens=max_new_tokens, sampling=NEUTRAL)])


def forever(command: pb.Command, is_over: list[bool]) -> Iterator[pb.Command]:
    """A stream of commands that stays open."""
    yield command
    while not is_over:
        time.sleep(0.02)


def test_sigterm_finishes_running_requests_and_logs_no_tokens(
    shard: subprocess.Popen[str], stub: shard_pb2_grpc.ShardStub
) -> None:
    is_over: list[bool] = []
    token_ids: list[int] = []
    reasons = []
    for message in stub.Serve(forever(submit(50), is_over), timeout=TIMEOUT_S):
        for output in message.outputs:
            if not token_ids:
                shard.send_signal(signal.SIGINT)  # ignored: only the parent's SIGTERM counts
                shard.send_signal(signal.SIGTERM)
            token_ids += output.token_ids
            reasons.append(output.finish_reason)
    is_over.append(True)
    assert len(token_ids) == 50 and len(set(token_ids)) >= 12
    assert reasons[-1] == pb.FINISH_LENGTH
    _, log = shard.communicate(timeout=TIMEOUT_S)
    assert shard.returncode == 0, log
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert [event["event"] for event in events][-1] == "ended"
    assert "101, 102" not in log and str(token_ids[:2])[1:-1] not in log


@pytest.mark.long
def test_an_invalid_message_ends_its_stream_only(
    shard: subprocess.Popen[str], stub: shard_pb2_grpc.ShardStub, tmp_path: Path
) -> None:
    is_over: list[bool] = []
    running = stub.Serve(forever(submit(50), is_over), timeout=TIMEOUT_S)
    for garbage in (bytes(range(256)) * 40, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(255, -1, -1)) * 40):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(f"{tmp_path}/shard.sock")
            raw.sendall(garbage)
    with grpc.insecure_channel(f"unix:{tmp_path}/shard.sock") as channel:
        serve = channel.stream_stream("/lorikeet.shard.v1.Shard/Serve")
        with pytest.raises(grpc.RpcError, match="no Command"):
            list(serve(iter([b"\x0a\xff\xff\xff"]), timeout=TIMEOUT_S))
    reasons: list[int] = []
    for message in running:
        reasons += [output.finish_reason for output in message.outputs]
        if any(reasons):
            break
    is_over.append(True)
    assert reasons[-1] == pb.FINISH_LENGTH
    assert shard.poll() is None


PARENT = """
import os, subprocess, sys, json, pathlib
path = pathlib.Path(sys.argv[1])
path.write_text(json.dumps(json.loads(path.read_text()) | {"parent_pid": os.getpid()}))
child = subprocess.Popen([sys.executable, "-m", "lorikeet.shard", str(path)])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.long
def test_it_does_not_outlive_its_parent(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(config)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and parent.stderr is not None
    child = int(parent.stdout.readline())
    for line in parent.stderr:
        if '"ready"' in line:
            break
    parent.kill()
    parent.communicate(timeout=TIMEOUT_S)  # the child holds stderr: this returns when it has ended
    assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num_pages": 1}, "KV memory holds 32 tokens"),
        ({"listen": "unix:/nonexistent/folder/shard.sock"}, "cannot listen at unix:/nonexistent"),
    ],
)
def test_a_failed_start_logs_one_event(tmp_path: Path, model: Path, values: dict[str, object], reason: str) -> None:
    process = start(write_config(tmp_path, model, **values))
    _, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    event = json.loads(log.splitlines()[-1])
    assert event["level"] == "error"
    assert reason in event["reason"]


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("is_whole_machine", [True, pytest.param(False, marks=pytest.mark.long)])
def test_as_many_threads_as_cores_are_pinned(tmp_path: Path, model: Path, is_whole_machine: bool) -> None:
    cores = os.sched_getaffinity(0)
    config = write_config(tmp_path, model, parent_pid=os.getpid(), threads=len(cores) - (not is_whole_machine))
    process = start(config)
    try:
        with grpc.insecure_channel(f"unix:{tmp_path}/shard.sock") as channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
            end = time.monotonic() + TIMEOUT_S
            if is_whole_machine:
                while len(os.sched_getaffinity(process.pid)) > 1:
                    assert time.monotonic() < end
                    time.sleep(0.05)
            else:
                ready = health_pb2_grpc.HealthStub(channel)
                while ready.Check(health_pb2.HealthCheckRequest()).status != health_pb2.HealthCheckResponse.SERVING:
                    assert time.monotonic() < end
                    time.sleep(0.05)
                time.sleep(0.5)
                assert os.sched_getaffinity(process.pid) == cores
    finally:
        process.kill()
        process.communicate()
