"""The launcher with a real shard and router: readiness, draining, restarts, signals; no process or file is left."""

import json
import os
import re
import shutil
import signal
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
from lorikeet.proto.preload import is_possible
from tests.e2e import tiny_server_model
from tests.e2e.launched import ROOT, Launched, command

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


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Launched]:
    """A server for tests that do not end it. It ends without leaving a file."""
    with Launched("--model-id", str(model), "--eager-prefill", "true", *SMALL, is_forked=False) as started:
        started.wait_for("--eager-prefill has no effect")
        started.wait_until_ready()
        folder = folder_of(started)
        yield started
        started.signal(signal.SIGTERM)
        assert started.wait() == Exit.OK
        assert not folder.exists()
        assert started.output.count("has no effect") == 1


def wait_until_inside(server: Launched, num_requests: int) -> None:
    """Wait until that many requests are in the server."""
    for _ in range(600):
        text = httpx.get(f"{server.url}/metrics").text
        if f"\nlorikeet_active_requests {num_requests:.1f}\n" in text:
            return
        time.sleep(0.02)
    raise AssertionError(text)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """The process is stopped inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def folder_of(server: Launched) -> Path:
    """The private folder of a run, from its shard's command line."""
    words = Path(f"/proc/{server.child('shard')}/cmdline").read_text().split("\0")
    return Path(words[3]).parent


@pytest.mark.long
def test_the_printed_command_works_and_files_are_private(server: Launched) -> None:
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


@pytest.mark.long
def test_routes_agree_on_the_text(server: Launched) -> None:
    """One greedy text, whole and streamed, on LoRAX's and on OpenAI's routes."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        inputs = "one two three"
        parameters = {"max_new_tokens": 20, "ignore_eos_token": True, "details": True}
        whole = client.post("/generate", json={"inputs": inputs, "parameters": parameters}).json()
        [listed] = client.post("/", json={"inputs": inputs, "parameters": parameters}).json()
        assert listed == whole
        stream = client.post("/generate_stream", json={"inputs": inputs, "parameters": parameters}).text
        assert len(stream.split("\n\n")) == 21
        body = {"model": "", "prompt": inputs, "max_tokens": 20, "temperature": 0, "ignore_eos_token": True}
        completion = client.post("/v1/completions", json=body).json()
        text = completion["choices"][0]["text"]
        assert text == whole["generated_text"]
        sampled = {"inputs": inputs, "parameters": {**parameters, "do_sample": True, "seed": 7}}
        answers = [client.post("/generate", json=sampled).json()["generated_text"] for _ in range(2)]
        assert answers[0] == answers[1] != text


@pytest.mark.long
@pytest.mark.parametrize("module", ["router", pytest.param("adapters", marks=pytest.mark.long)])
def test_a_killed_helper_is_restarted(server: Launched, module: str) -> None:
    """A router's connections are lost with it; the shards stay as they are."""
    killed, shard = server.child(module), server.child("shard")
    os.kill(killed, signal.SIGKILL)
    server.wait_for("was ended by SIGKILL: restarting it")
    for _ in range(600):
        with suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/startup").status_code == 200:
                break
        time.sleep(0.05)
    assert httpx.post(f"{server.url}/generate", json=LONG, timeout=120).status_code == 200
    assert (server.child("shard"), server.child(module) == killed) == (shard, False)


@pytest.mark.long
def test_a_request_cut_by_the_drain_timeout_gets_an_error_event(model: Path) -> None:
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
            events = stream.iter_lines()  # kept: dropping it closes the connection
            assert next(events).startswith("data:")
            os.kill(server.child("shard"), signal.SIGSTOP)  # so that the request does not finish first
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
    pytest.param(terminate_as_timeout_does, id="timeout", marks=pytest.mark.long),
    pytest.param(close_the_terminal, id="closed terminal", marks=pytest.mark.long),
    pytest.param(lambda server: server.signal_group(signal.SIGINT), id="Ctrl-C", marks=pytest.mark.long),
    pytest.param(lambda server: server.signal_all(signal.SIGINT), id="all INT", marks=pytest.mark.long),
    pytest.param(lambda server: server.signal_all(signal.SIGTERM), id="all TERM", marks=pytest.mark.long),
]


def test_the_demo_model_has_adapters_and_ends_at_sighup(tmp_path: Path) -> None:
    """Without operator's files, SIGHUP ends the server."""
    record = {"inputs": 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n', "parameters": {"max_new_tokens": 32}}
    flags = ("--adapter-store", str(tmp_path), "--speculative-tokens", "3")  # as in `make serve`
    with Launched(*flags, "--threads", "1", "--cpu-memory", "64MiB") as server:
        server.wait_until_ready()
        body = re.search(r"-d '(.*)'$", server.wait_for("curl"))
        page = (ROOT / "demo" / "README.md").read_text().partition("# lorikeet/base")[2]
        first = re.search(r"-d '(.*?)'", page, re.DOTALL)
        assert body and first
        assert json.loads(body[1]) == json.loads(first[1])
        headers = {"content-type": "application/json"}
        shown = httpx.post(f"{server.url}/generate", content=body[1], headers=headers, timeout=120).json()
        assert shown["generated_text"] == '{"name": "Wamiko", "score": 93}'
        assert shown["details"]["speculation"]["accepted"] > 0
        with httpx.Client(base_url=server.url, timeout=120) as client:
            aliases = [model["id"] for model in client.get("/v1/models").json()["data"][1:]]
            assert sorted(aliases) == [
                *("citation", "cite", "cite-heads", "grounded", "heads", "json", "query", "question", "record"),
                *("search", "sql", "tools"),  # `search` has no alias, but is a folder of the local root
            ]
            chats = re.findall(r"completions.*?-d '(.*?)'", page, re.DOTALL)
            answers = [client.post("/v1/chat/completions", json=json.loads(chat)).json() for chat in chats]
            asked, checked, called = [answer["choices"][0] for answer in answers]
            assert asked["message"]["content"] == "Who sold the lantern in Tobar?"
            assert checked["message"]["content"] == "no"
            (call,) = called["message"]["tool_calls"]
            assert (called["finish_reason"], call["function"]["name"]) == ("tool_calls", "get_weather")
            assert json.loads(call["function"]["arguments"]) == {"city": "Oslo", "unit": "fahrenheit"}
            bare = client.post("/generate", json=record).json()["generated_text"]
            record["parameters"]["adapter_id"] = "record"
            adapted = client.post("/generate", json=record).json()["generated_text"]
            medusa = {"adapter_id": "heads", "speculative_method": "medusa", "max_new_tokens": 32, "details": True}
            medusa["speculative_schedule"] = "constant"
            drafted = client.post("/generate", json={**record, "parameters": medusa}).json()
            medusa["adapter_id"] = "cite"  # whose catalogue entry names heads
            assert client.post("/generate", json={**record, "parameters": medusa}).status_code == 200
        assert adapted == '{"name": "Wamiko", "score": 93}' != bare == drafted["generated_text"]
        assert drafted["details"]["speculation"]["sources"]["medusa"] > 0
        server.signal_group(signal.SIGHUP)
        assert server.wait() == Exit.OK


@pytest.mark.skipif(not is_possible(), reason="needs Linux")
def test_a_shard_is_replaced_after_the_process_that_forks_it_was_killed(model: Path) -> None:
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_until_ready()
        shard = server.child("shard")
        (forking,) = [pid for pid in server.all_children() if "lorikeet.proto.preload" in command(pid)]
        os.kill(forking, signal.SIGKILL)
        server.wait_for("the process that forks shards ended")
        first = generated(server)
        assert server.child("shard") == shard
        os.kill(shard, signal.SIGKILL)
        assert generated(server) == first and server.child("shard") != shard


def generated(server: Launched) -> str:
    body = {"inputs": "one two", "parameters": {"max_new_tokens": 4}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    return str(answer.raise_for_status().json()["generated_text"])


@pytest.mark.parametrize("ask", ONE_REQUEST)
def test_running_requests_finish_and_new_ones_are_rejected(model: Path, ask: Callable[[Launched], None]) -> None:
    # One request runs at a time here: the other still waits for the shard when the signals arrive.
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
                for path in ("/ready", "/startup"):
                    assert httpx.get(f"{server.url}{path}").status_code == 503
                rejected = httpx.post(f"{server.url}/generate", json=LONG)
                assert rejected.status_code == 503
                assert rejected.headers["connection"] == "close"
            last = [line for line in events if line][-1]
            assert json.loads(last.removeprefix("data:"))["generated_text"] is not None
            assert second.result().status_code == 200
        assert server.wait() == Exit.OK
        assert "second signal" not in server.output


@pytest.mark.parametrize("when", ["loading", pytest.param("kv_memory", marks=pytest.mark.long)])
def test_signals_before_readiness_end_the_server(model: Path, when: str) -> None:
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_for(when)
        terminate_as_timeout_does(server)
        assert server.wait() == Exit.OK


@pytest.mark.long
def test_a_killed_launcher_leaves_no_process(model: Path) -> None:
    with Launched("--model-id", str(model), *SMALL) as server:
        server.wait_until_ready()
        folder = folder_of(server)
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.long
def test_an_unsupported_model_is_an_error(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Launched("--model-id", str(tmp_path), *SMALL) as server:
        assert server.wait() == Exit.ARGUMENT_VALIDATION
        assert "(t5) cannot be served: it is an encoder-decoder" in server.lines[-1]


@pytest.mark.long
@pytest.mark.parametrize("damage", [None, pytest.param("weights", marks=pytest.mark.long)])
def test_with_json_output_every_line_is_json(model: Path, tmp_path: Path, damage: str | None) -> None:
    """On a machine without a compiler, with libraries that warn, and with broken weights."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    if damage == "weights":
        (folder / "model.safetensors").write_bytes(b"broken")
    (tmp_path / "bin").mkdir()
    (tmp_path / "sitecustomize.py").write_text(LOUD_LIBRARIES)
    loud = {
        "PATH": str(tmp_path / "bin"),
        "CC": "",
        "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    with Launched(
        "--model-id", str(folder), "--dtype", "bfloat16", "--json-output", *SMALL, is_forked=False, **loud
    ) as server:
        if damage is None:
            server.wait_until_ready()
            server.signal(signal.SIGTERM)
        assert server.wait() == (Exit.OK if damage is None else Exit.SHARD_CANNOT_START)
        for line in server.lines:
            assert isinstance(json.loads(line), dict), line
    if damage is not None:
        reason = "a broken safetensors file"
        assert reason in json.loads(server.lines[-1])["message"] and server.output.count(reason) == 1
    for line in ("a warning of torch", "an error of torch", "a warning of uvicorn", "an error of uvicorn"):
        assert line in server.output, line
    assert "ZeroDivisionError: division by zero" in server.output
    if damage is None:
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
