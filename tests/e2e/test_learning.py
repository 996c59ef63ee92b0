"""Heads learned while serving, over HTTP with the real trainer: texts, receipts, a killed shard, and a purge."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.launched import ROOT, Launched
from tests.e2e.test_receipts import replayed
from tests.shard.learning.test_trainer import speed_up

pytestmark = pytest.mark.long

DEMO = ROOT / "demo"
PROMPTS = [f"def {name}_{kind}(self):\n    " for name in ("get", "set", "read", "open") for kind in "abcdefgh"]
NUM_TOKENS = 80
LEARNED_S = 240.0
ADMIN = {"authorization": "Bearer secret"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Launched]:
    flags = ("--model-id", str(DEMO / "base"), "--dtype", "float32", "--threads", "1", "--cpu-memory", "256MiB")
    with Launched(*flags, "--learn-heads", "--adapter-store", str(tmp_path), ADMIN_KEY="secret") as launched:
        yield launched.wait_until_ready()


def ask(server: Launched, prompt: str, **parameters: Any) -> dict[str, Any]:
    usual = {
        "max_new_tokens": NUM_TOKENS,
        "ignore_eos_token": True,
        "details": True,
        "speculative_schedule": "constant",
    }
    body = {"inputs": prompt, "parameters": {**usual, **parameters}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ask_all(server: Launched, **parameters: Any) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt, **parameters), PROMPTS))


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [[token["id"] for token in answer["details"]["tokens"]] for answer in answers]


def num_from_heads(answers: list[dict[str, Any]]) -> int:
    return sum(answer["details"]["speculation"]["sources"].get("medusa", 0) for answer in answers)


def learning(server: Launched, method: str = "GET") -> dict[str, Any]:
    answer = httpx.request(method, f"{server.url}/admin/learning", headers=ADMIN, timeout=60)
    assert answer.status_code == 200, answer.text
    (shard,) = answer.json()["shards"]
    return dict(shard)


def trainers(server: Launched) -> list[int]:
    shard = server.shard(0)
    children = Path(f"/proc/{shard}/task/{shard}/children").read_text().split()
    return [int(pid) for pid in children if "medusa.learning" in Path(f"/proc/{pid}/cmdline").read_text()]


def learn(server: Launched) -> list[list[dict[str, Any]]]:
    """Ask until heads are adopted; returns all answers."""
    answers, end = [], time.monotonic() + LEARNED_S
    while time.monotonic() < end:
        answers.append(ask_all(server, receipt=True))
        for pid in trainers(server):
            speed_up(pid)
        if learning(server)["totals"]["num_adopted"] != "0" and num_from_heads(answers[-1]) > 100:
            return answers
    raise AssertionError(learning(server))


def test_a_server_learns_heads_and_keeps_them(server: Launched, tmp_path: Path) -> None:
    expected = ids(ask_all(server, speculative_tokens=0))
    answers = learn(server)
    assert all(ids(each) == expected for each in answers)
    receipts = tmp_path / "receipts.jsonl"
    chosen = [answer["details"]["receipt"] for answer in (answers[0][0], answers[-1][0], answers[-1][-1])]
    receipts.write_text("\n".join(httpx.Response(200, json=each).text for each in chosen))
    assert replayed(server.url, receipts)[0] == 0
    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(ask, server, prompt) for prompt in PROMPTS]
        time.sleep(0.5)
        os.kill(server.shard(0), 9)
        assert ids([each.result() for each in running]) == expected
    server.wait_for("ready")
    again = ask_all(server)
    while not num_from_heads(again):  # the new shard loads the adopted heads while it serves
        again = ask_all(server)
    assert ids(again) == expected
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'lorikeet_learning_decisions_total{decision="adopted"}' in metrics
    shown = learning(server, "DELETE")
    assert not shown["pairs"] and not list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob("learning/*"))
    after = ask_all(server)
    assert ids(after) == expected and num_from_heads(after) == 0
