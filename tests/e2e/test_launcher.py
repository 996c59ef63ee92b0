"""The launcher with a real shard and a real router: readiness, drain, deaths, and that nothing is left behind."""

import json
import os
import re
import signal
import socket
import stat
from pathlib import Path

import httpx
import pytest

from launcher.exits import Exit
from tests.e2e import tiny_server_model
from tests.e2e.launched import Launched, free_port

SMALL = ("--cpu-memory", "64MiB", "--threads", "1")
LONG = {"inputs": "one two", "parameters": {"max_new_tokens": 3000, "ignore_eos_token": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_server_model.make(tmp_path_factory.mktemp("model"))


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


def test_a_second_signal_forces(model: Path) -> None:
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_until_ready()
        with httpx.stream("POST", f"{server.url}/generate_stream", json=LONG, timeout=120) as stream:
            assert next(stream.iter_lines()).startswith("data:")
            server.signal(signal.SIGTERM)
            server.wait_for("router_draining")
            server.signal(signal.SIGTERM)
            assert server.wait() == Exit.FORCED


def test_a_killed_launcher_leaves_no_orphan(model: Path) -> None:
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_until_ready()
        folder = folder_of(server)
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.parametrize(("module", "exit"), [("shard", Exit.SHARD_FAILED), ("router", Exit.WEBSERVER_FAILED)])
def test_a_dead_process_ends_the_server(model: Path, module: str, exit: Exit) -> None:
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_until_ready()
        os.kill(server.child(module), signal.SIGKILL)
        assert server.wait() == exit
        assert "was ended by SIGKILL while serving" in server.output


def test_a_model_that_cannot_be_served_is_said(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Launched("--model-id", str(tmp_path), *SMALL) as server:
        assert server.wait() == Exit.SHARD_CANNOT_START
        assert "t5" in server.output
        assert "shard 0 ended with exit code 1 before it was ready" in server.output


def test_a_taken_port_is_said_before_anything_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Launched("--model-id", str(model), port=taken.getsockname()[1]) as server:
            assert server.wait() == Exit.WEBSERVER_CANNOT_START
            assert "it is taken by another process" in server.output
            assert "loading" not in server.output


def test_logs_are_json_and_the_shard_may_listen_on_tcp(model: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Launched("--model-id", str(model), "--json-output", "--shard-address", address, *SMALL) as server:
        server.wait_until_ready()
        answer = httpx.post(f"{server.url}/generate", json={"inputs": "Hi", "parameters": {"max_new_tokens": 4}})
        assert answer.status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == Exit.OK
        for line in server.lines:
            assert isinstance(json.loads(line), dict), line
