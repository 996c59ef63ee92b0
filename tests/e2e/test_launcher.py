"""The launcher with a real shard and a real router: readiness, drain, deaths, and that nothing is left behind."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from lorikeet.launcher.exits import Exit
from lorikeet.launcher.processes.supervisor import SAME_REQUEST_S
from tests.e2e import tiny_server_model
from tests.e2e.launched import ROOT, Launched

SMALL = ("--cpu-memory", "64MiB", "--threads", "1")
LOUD_LIBRARIES = """
import logging, sys, threading, warnings

class Loud:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "uvicorn"):
            warnings.warn(f"a warning of {name}")
            logging.getLogger("some.library").error("an error of %s", name)
            threading.Thread(target=lambda: 1 / 0).start()

sys.meta_path.insert(0, Loud())
"""
LONG = {"inputs": "one two", "parameters": {"max_new_tokens": 3000, "ignore_eos_token": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_server_model.make(tmp_path_factory.mktemp("model"))


def wait_until_inside(server: Launched, num_requests: int) -> None:
    """So many requests have come in and are not answered."""
    for _ in range(600):
        text = httpx.get(f"{server.url}/metrics").text
        if f"\nlorikeet_active_requests {num_requests:.1f}\n" in text:
            return
        time.sleep(0.02)
    raise AssertionError(text)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def folder_of(server: Launched) -> Path:
    """The private folder of a run, from its shard's command line."""
    words = Path(f"/proc/{server.child('shard')}/cmdline").read_text().split("\0")
    return Path(words[3]).parent


def test_it_serves_what_it_says_and_ends_without_a_trace(model: Path) -> None:
    with Launched("--model-id", str(model), "--eager-prefill", "true", *SMALL) as server:
        server.wait_for("--eager-prefill has no effect")
        server.wait_until_ready()
        folder = folder_of(server)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "shard-0.sock").stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "router.json").stat().st_mode) == 0o600
        line = server.wait_for("curl")
        url, body = re.search(r"curl (\S+)", line), re.search(r"-d '(.*)'$", line)
        assert url and body
        answer = httpx.post(url[1], content=body[1], headers={"content-type": "application/json"})
        assert answer.status_code == 200 and answer.json()["generated_text"]
        shown = httpx.get(f"{server.url}/info").json()["effective_configuration"]
        assert shown["flags"]["cpu-memory"] == 64 * 2**20
        assert shown["given"]["model-id"] == "--model-id"
        server.signal(signal.SIGTERM)
        assert server.wait() == Exit.OK
        assert not folder.exists()
        assert server.output.count("has no effect") == 1


def test_running_requests_finish_and_new_ones_are_turned_away(model: Path) -> None:
    with Launched("--model-id", str(model), "--drain-timeout-s", "600", *SMALL) as server:
        server.wait_until_ready()
        with httpx.stream("POST", f"{server.url}/generate_stream", json=LONG, timeout=120) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data:")
            server.signal(signal.SIGTERM)
            server.wait_for("router_draining")
            for path in ("/ready", "/startup"):
                assert httpx.get(f"{server.url}{path}").status_code == 503
            turned_away = httpx.post(f"{server.url}/generate", json=LONG)
            assert turned_away.status_code == 503
            assert turned_away.headers["connection"] == "close"
            last = [line for line in events if line][-1]
        assert json.loads(last.removeprefix("data:"))["generated_text"] is not None
        assert server.wait() == Exit.OK


def test_what_does_not_finish_in_time_gets_an_error_event(model: Path) -> None:
    with Launched("--model-id", str(model), "--drain-timeout-s", "0.2", *SMALL) as server:
        server.wait_until_ready()
        with httpx.stream("POST", f"{server.url}/generate_stream", json=LONG, timeout=120) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data:")
            server.signal(signal.SIGINT)
            last = [line for line in events if line][-1]
        assert "error" in json.loads(last.removeprefix("data:"))
        assert server.wait() == Exit.OK


@pytest.mark.long
def test_a_second_signal_forces(model: Path) -> None:
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_until_ready()
        with httpx.stream("POST", f"{server.url}/generate_stream", json=LONG, timeout=120) as stream:
            events = stream.iter_lines()  # kept: a client that drops it is gone
            assert next(events).startswith("data:")
            os.kill(server.child("shard"), signal.SIGSTOP)  # so that the request is not done before
            server.signal(signal.SIGTERM)
            server.wait_for("router_draining")
            time.sleep(SAME_REQUEST_S)
            server.signal(signal.SIGTERM)
            assert server.wait() == Exit.FORCED


def terminate_as_timeout_does(server: Launched) -> None:
    server.signal(signal.SIGTERM)
    server.signal_group(signal.SIGTERM)


def close_the_terminal(server: Launched) -> None:
    server.signal_group(signal.SIGHUP)
    server.signal_group(signal.SIGTERM)


ONE_REQUEST = [
    pytest.param(terminate_as_timeout_does, id="timeout"),
    pytest.param(close_the_terminal, id="closed terminal", marks=pytest.mark.long),
    pytest.param(lambda server: server.signal_group(signal.SIGINT), id="Ctrl-C", marks=pytest.mark.long),
    pytest.param(lambda server: server.signal_all(signal.SIGINT), id="all INT", marks=pytest.mark.long),
    pytest.param(lambda server: server.signal_all(signal.SIGTERM), id="all TERM", marks=pytest.mark.long),
]


def test_the_embedded_model_brings_its_adapters_and_ends_with_its_terminal(tmp_path: Path) -> None:
    """Nobody named files that SIGHUP could ask to be read again."""
    record = {"inputs": 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n', "parameters": {"max_new_tokens": 32}}
    flags = ("--adapter-store", str(tmp_path), "--speculative-tokens", "3")  # as `make serve` has it
    with Launched(*flags, "--threads", "1", "--cpu-memory", "64MiB") as server:
        server.wait_until_ready()
        body = re.search(r"-d '(.*)'$", server.wait_for("curl"))
        first = re.search(r"-d '(.*?)'", (ROOT / "README.md").read_text(), re.DOTALL)
        assert body and first
        assert json.loads(body[1]) == json.loads(first[1])
        shown = httpx.post(
            f"{server.url}/generate", content=body[1], headers={"content-type": "application/json"}
        ).json()
        assert shown["generated_text"] == '{"name": "Wamiko", "score": 93}'
        assert shown["details"]["speculation"]["accepted"] > 0
        with httpx.Client(base_url=server.url, timeout=120) as client:
            aliases = [model["id"] for model in client.get("/v1/models").json()["data"][1:]]
            assert sorted(aliases) == [
                *("calc", "citation", "cite", "cite-heads", "heads", "json", "query", "record", "sql", "value")
            ]
            bare = client.post("/generate", json=record).json()["generated_text"]
            record["parameters"]["adapter_id"] = "record"
            adapted = client.post("/generate", json=record).json()["generated_text"]
            medusa = {"adapter_id": "heads", "speculative_method": "medusa", "max_new_tokens": 32, "details": True}
            medusa["speculative_schedule"] = "constant"
            drafted = client.post("/generate", json={**record, "parameters": medusa}).json()
            medusa["adapter_id"] = "cite"  # which names its heads itself
            assert client.post("/generate", json={**record, "parameters": medusa}).status_code == 200
        assert adapted == '{"name": "Wamiko", "score": 93}' != bare == drafted["generated_text"]
        assert drafted["details"]["speculation"]["sources"]["medusa"] > 0
        server.signal_group(signal.SIGHUP)
        assert server.wait() == Exit.OK


@pytest.mark.parametrize("ask", ONE_REQUEST)
def test_one_request_to_end_drains_however_many_signals_carry_it(model: Path, ask: Callable[[Launched], None]) -> None:
    # One request runs at a time here: the other still waits for the shard when the signals come.
    body = {"inputs": "one two", "parameters": {"max_new_tokens": 1000, "ignore_eos_token": True}}
    one_at_a_time = ("--max-total-tokens", "1024", "--max-batch-total-tokens", "1024", "--drain-timeout-s", "600")
    with Launched("--model-id", str(model), *one_at_a_time, *SMALL) as server:
        server.wait_until_ready()
        with (
            httpx.Client(base_url=server.url, timeout=120) as client,
            client.stream("POST", "/generate_stream", json=body) as first,
            ThreadPoolExecutor(1) as pool,
        ):
            events = first.iter_lines()
            assert next(events).startswith("data:")
            with paused(server.child("shard")):
                second = pool.submit(client.post, "/generate", json=body)
                wait_until_inside(server, 2)
                ask(server)
                server.wait_for("router_draining")
            last = [line for line in events if line][-1]
            assert json.loads(last.removeprefix("data:"))["generated_text"] is not None
            assert second.result().status_code == 200
        assert server.wait() == Exit.OK
        assert "second signal" not in server.output


@pytest.mark.parametrize("when", ["loading", pytest.param("kv memory", marks=pytest.mark.long)])
def test_two_signals_before_it_is_ready_end_it_quietly(model: Path, when: str) -> None:
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_for(when)
        terminate_as_timeout_does(server)
        assert server.wait() == Exit.OK


def test_a_killed_launcher_leaves_no_orphan(model: Path) -> None:
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_until_ready()
        folder = folder_of(server)
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.parametrize("module", ["router", pytest.param("adapters", marks=pytest.mark.long)])
def test_a_dead_helper_is_started_again(model: Path, module: str) -> None:
    """A router's connections are lost with it; the shards stay as they are."""
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_until_ready()
        dead, shard = server.child(module), server.child("shard")
        os.kill(dead, signal.SIGKILL)
        server.wait_for("was ended by SIGKILL: starting another one")
        for _ in range(600):
            with suppress(httpx.HTTPError):
                if httpx.get(f"{server.url}/startup").status_code == 200:
                    break
            time.sleep(0.05)
        assert httpx.post(f"{server.url}/generate", json=LONG, timeout=120).status_code == 200
        assert (server.child("shard"), server.child(module) == dead) == (shard, False)
        server.signal(signal.SIGTERM)
        assert server.wait() == Exit.OK


def test_a_model_that_cannot_be_served_is_said(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Launched("--model-id", str(tmp_path), *SMALL) as server:
        assert server.wait() == Exit.SHARD_CANNOT_START
        assert "t5" in server.output
        assert "shard 0 ended with exit code 1 before the server was ready" in server.output


def test_a_taken_port_is_said_before_anything_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Launched("--model-id", str(model), port=taken.getsockname()[1]) as server:
            assert server.wait() == Exit.WEBSERVER_CANNOT_START
            assert "it is taken by another process" in server.output
            assert "loading" not in server.output


@pytest.mark.parametrize("damage", [None, pytest.param("weights", marks=pytest.mark.long), "flag"])
def test_with_json_output_every_line_is_json(model: Path, tmp_path: Path, damage: str | None) -> None:
    """A machine without a compiler, libraries that warn, and what ends the server before it serves."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    if damage == "weights":
        (folder / "model.safetensors").write_bytes(b"broken")
    (tmp_path / "bin").mkdir()
    (tmp_path / "sitecustomize.py").write_text(LOUD_LIBRARIES)
    wrong = ["--prot", "80"] if damage == "flag" else []
    loud = {
        "PATH": str(tmp_path / "bin"),
        "CC": "",
        "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    with Launched("--model-id", str(folder), "--dtype", "bfloat16", "--json-output", *wrong, *SMALL, **loud) as server:
        if damage is None:
            server.wait_until_ready()
            server.signal(signal.SIGTERM)
        expected = {None: Exit.OK, "weights": Exit.SHARD_CANNOT_START, "flag": Exit.ARGUMENT_VALIDATION}[damage]
        assert server.wait() == expected
        for line in server.lines:
            assert isinstance(json.loads(line), dict), line
    if damage != "flag":
        for said in ("a warning of torch", "an error of torch", "a warning of uvicorn", "an error of uvicorn"):
            assert said in server.output, said
        assert "ZeroDivisionError: division by zero" in server.output
    if damage is None and "avx512_bf16" in Path("/proc/cpuinfo").read_text():
        assert "no C compiler" in server.output


@pytest.mark.long
def test_logs_are_json(model: Path) -> None:
    with Launched("--model-id", str(model), "--json-output", *SMALL) as server:
        server.wait_until_ready()
        answer = httpx.post(f"{server.url}/generate", json={"inputs": "Hi", "parameters": {"max_new_tokens": 4}})
        assert answer.status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == Exit.OK
        for line in server.lines:
            assert isinstance(json.loads(line), dict), line
