"""Shards that exit or hang under load: every answer is the same as without faults, and the server keeps serving."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from lorikeet.launcher import Client
from lorikeet.launcher.cli.client import Answer
from tests.e2e.conftest import Replicas
from tests.e2e.launched import Launched

NUM_TOKENS = 120
DISTRIBUTIONS: tuple[dict[str, Any], ...] = (
    {"speculative_tokens": 0},
    {"speculative_method": "lookup", "speculative_schedule": "constant"},
    {
        "speculative_method": "draft",
        "speculative_verification": "shared-noise",
        "speculative_schedule": "constant",
        "do_sample": True,
        "seed": 5,
    },
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 6, "decoder_input_details": True},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"do_sample": True, "seed": 9, "watermark": True, "top_n_tokens": 2},
    {"do_sample": True, "seed": 4, "bad_words": ["self", "return a", "def"], "min_tokens": 50, "stop_token_ids": [2]},
)
PROMPTS = ("def add(a, b):\n    return a + b\n\n", "class A:\n    def __init__(self, name):\n")
ASKED = [(prompt, distribution) for prompt in PROMPTS for distribution in DISTRIBUTIONS]


def ask(client: Client, prompt: str, distribution: dict[str, Any]) -> Answer:
    return client.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos_token=True, **distribution)


def ask_all(client: Client, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[Any, ...]]:
    """The part of answers that must be the same: text, ids, log probabilities, alternatives, prompt scores."""
    with ThreadPoolExecutor(len(ASKED)) as pool:
        made = [pool.submit(ask, client, prompt, distribution) for prompt, distribution in ASKED]
        meanwhile()
        answers = [each.result() for each in made]
    for answer in answers:
        assert answer.details["generated_tokens"] == NUM_TOKENS == len(answer.tokens)
        report = answer.details.get("speculation")
        if report is not None:
            assert sum(report["sources"].values()) == NUM_TOKENS
            assert report["steps"] + answer.details["skipped_tokens"] == NUM_TOKENS
    return [
        (
            answer.text,
            [(token.id, token.text, token.logprob) for token in answer.tokens],
            answer.details.get("prefill"),
            answer.details.get("top_tokens"),
        )
        for answer in answers
    ]


def num_moved(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("lorikeet_requests_retried_total"))


def until_tokens(url: str, num_tokens: int) -> None:
    """Wait until that many more tokens have been generated."""

    def count() -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        name = "lorikeet_generated_tokens_total"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    first, end = count(), time.monotonic() + 60
    while count() < first + num_tokens:
        assert time.monotonic() < end
        time.sleep(0.01)


def num_connected(server: Launched, index: int) -> int:
    return sum("shard_connected" in line and f"/shard-{index}.sock" in line for line in server.lines)


def until_back(server: Launched, index: int, times: int = 2) -> None:
    """Wait until the router has connected to that shard so many times."""
    end = time.monotonic() + 120
    while num_connected(server, index) < times:
        assert time.monotonic() < end, server.output
        time.sleep(0.05)


@pytest.fixture
def server(replicas: Replicas) -> Launched:
    return replicas.launched


@pytest.fixture(scope="module")
def undisturbed(replicas: Replicas) -> list[tuple[Any, ...]]:
    return ask_all(Client(replicas.launched.url))


@pytest.mark.parametrize(
    ("index", "number"), [(0, signal.SIGKILL), pytest.param(1, signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_answers_are_the_same_when_a_shard_is_lost(
    server: Launched, undisturbed: list[tuple[Any, ...]], index: int, number: int
) -> None:
    dead, moved = server.shard(index), num_moved(server.url)

    def end_it() -> None:
        until_tokens(server.url, 500)
        os.kill(dead, number)

    assert ask_all(Client(server.url), end_it) == undisturbed
    assert num_moved(server.url) > moved
    until_back(server, index)
    assert server.shard(index) != dead


@pytest.mark.long
def test_answers_are_the_same_when_every_shard_is_lost(server: Launched, undisturbed: list[tuple[Any, ...]]) -> None:
    health: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            health.append(httpx.get(f"{server.url}/health").status_code)
            time.sleep(0.05)

    def end_them() -> None:
        until_tokens(server.url, 500)
        watcher.start()
        for index in range(2):
            os.kill(server.shard(index), signal.SIGKILL)

    watcher = threading.Thread(target=watch)
    try:
        assert ask_all(Client(server.url), end_them) == undisturbed
    finally:
        ended.set()
        watcher.join()
    assert set(health) == {200}


@pytest.mark.long
def test_requests_wait_when_the_router_and_every_shard_are_lost(server: Launched) -> None:
    """The new router begins in recovery: requests and probes get no 503, as long as shards should be back."""
    before = num_connected(server, 0)
    for pid in (server.child("router"), server.shard(0), server.shard(1)):
        os.kill(pid, signal.SIGKILL)
    answers: list[httpx.Response] = []
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 8}}
    end = time.monotonic() + 120
    while num_connected(server, 0) == before:
        assert time.monotonic() < end, server.output
        try:
            answers.append(httpx.get(f"{server.url}/health", timeout=120))
            answers.append(httpx.post(f"{server.url}/generate", json=body, timeout=120))
        except httpx.TransportError:  # sent to the router that was killed
            time.sleep(0.1)
    answers.append(httpx.post(f"{server.url}/generate", json=body, timeout=120))
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    for index in range(2):
        until_back(server, index)


@pytest.mark.long
def test_a_rolling_restart_under_load_changes_no_answer(server: Launched, undisturbed: list[tuple[Any, ...]]) -> None:
    """SIGUSR2: requests on open and on new connections are answered all the time."""
    before = {pid for pid in server.children() if pid != server.pid}
    statuses: list[int] = []
    over = threading.Event()

    def load(*, stays: bool) -> None:
        body = {"inputs": "import os", "parameters": {"max_new_tokens": 8}}
        with httpx.Client(timeout=120) as kept:
            while not over.is_set():
                ask = kept.post if stays else httpx.post
                statuses.append(ask(f"{server.url}/generate", json=body, timeout=120).status_code)

    clients = [threading.Thread(target=load, kwargs={"stays": stays}) for stays in (True, True, False)]
    for client in clients:
        client.start()
    try:
        assert ask_all(Client(server.url), lambda: os.kill(server.pid, signal.SIGUSR2)) == undisturbed
        server.wait_for("every process was replaced")
    finally:
        over.set()
        for client in clients:
            client.join()
    assert len(statuses) > 10 and set(statuses) == {200}
    assert not before & set(server.children())
    assert ask_all(Client(server.url)) == undisturbed


@pytest.mark.long
def test_a_resumable_stream_survives_its_connection_and_its_shard(server: Launched) -> None:
    """The client goes after a few events, the shard is killed, and another connection reads the same text."""
    body = {
        "inputs": PROMPTS[0],
        "parameters": {"max_new_tokens": 400, "ignore_eos_token": True, "do_sample": True, "seed": 3, "details": True},
    }
    expected = httpx.post(f"{server.url}/generate_stream", json=body, timeout=120).text
    headers = {"x-lorikeet-resumable": "60", "x-request-id": "read-on"}
    first = ""
    with httpx.stream("POST", f"{server.url}/generate_stream", json=body, headers=headers, timeout=120) as response:
        for part in response.iter_text():
            first += part
            if first.count("\n\n") >= 20:
                break
    moved = num_moved(server.url)
    times = [num_connected(server, index) for index in (0, 1)]
    for index in (0, 1):  # it runs on one of them
        os.kill(server.shard(index), signal.SIGKILL)
    for index in (0, 1):
        until_back(server, index, times[index] + 1)
    answer = httpx.get(f"{server.url}/v1/streams/read-on?from={first.count(chr(10) * 2)}", timeout=120)
    assert texts(first + answer.text) == texts(expected)
    assert num_moved(server.url) > moved


@pytest.mark.long
def test_an_activated_adapter_writes_the_same_text_when_its_shard_is_killed_in_the_middle(server: Launched) -> None:
    """Its start is found in the prompt again, not in the output, which the second shard gets as known tokens."""
    asked = "<|user|>Wamiko sold the lantern in Tobar. Sotra kept room 93.\nWhat do you know about Wamiko?<|end|>"
    invocation = "<|system|>question<|end|><|assistant|>"
    usual = {"max_new_tokens": 400, "ignore_eos_token": True, "do_sample": True, "seed": 3, "details": True}
    expected: dict[str | None, list[tuple[Any, ...]]] = {}
    for name in (None, "question"):
        prompt = f"{asked}<|assistant|>Wamiko sold the lantern in Tobar.<|end|>{invocation}"
        body = {"inputs": prompt, "parameters": {**usual, "adapter_id": name}}
        expected[name] = texts(httpx.post(f"{server.url}/generate_stream", json=body, timeout=120).text)
    assert expected["question"] != expected[None]
    moved, times = num_moved(server.url), [num_connected(server, index) for index in (0, 1)]
    events, shards = "", [server.shard(index) for index in (0, 1)]
    with httpx.stream("POST", f"{server.url}/generate_stream", json=body, timeout=120) as response:
        assert response.headers["x-lorikeet-adapter-activated"] == "true"
        for part in response.iter_text():
            events += part
            while events.count("\n\n") >= 20 and shards:  # it runs on one of them
                os.kill(shards.pop(), signal.SIGKILL)
    assert texts(events) == expected["question"]
    assert num_moved(server.url) > moved
    for index in (0, 1):
        until_back(server, index, times[index] + 1)


def texts(events: str) -> list[tuple[Any, ...]]:
    """Everything but which draft source gave a token, and times."""
    shown = [json.loads(line.removeprefix("data: ")) for line in events.split("\n\n") if line.startswith("data: ")]
    tokens = [(each["token"]["id"], each["token"]["text"], each["token"]["logprob"]) for each in shown]
    return [*tokens, (shown[-1]["generated_text"],)]
