"""Receipts of a busy server, replayed by lorikeet-replay against that server and others."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lorikeet.launcher import Client
from lorikeet.launcher.cli.replay import found_in
from tests.e2e.conftest import Replicas
from tests.e2e.launched import ROOT, Launched

SMALL = ("--cpu-memory", "256MiB", "--threads", "1")
SECRET = "def zyzzyva(quixotry):\n    return "
RECORD = 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n'
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
MERGED = {"ids": ["json", "cite"], "weights": [0.5, 0.5], "merge_strategy": "cat"}
CHAT = [{"role": "user", "content": "Write a loop."}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"adapter_id": "json", "speculative_method": "lookup", "speculative_schedule": "constant"}),
    ("/generate_stream", {"adapter_id": "cite", "speculative_method": "medusa", "details": True, **SAMPLED, "seed": 3}),
    ("/generate", {"adapter_id": "sql", "speculative_method": "draft", **SAMPLED, "seed": 2**64 - 1}),
    ("/generate", {"speculative_tokens": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3}),
    (
        "/generate_stream",
        {"speculative_method": "draft", "speculative_verification": "shared-noise", **SAMPLED, "top_k": 9},
    ),
    ("/generate", {"merged_adapters": MERGED, "speculative_tokens": 0, "stop": ["\n\n\n"]}),
    ("/generate", {"watermark": True, "seed": 5, **SAMPLED}),
    ("/v1/completions", {"model": "json", "logit_bias": {"312": 2.5}, "seed": 6}),
    ("/v1/chat/completions", {"model": "__base_model__", "seed": 7, "top_p": 0.9, "ignore_eos_token": True}),
    ("/generate", {"response_format": {"type": "json_object"}, "speculative_method": "lookup", **SAMPLED, "seed": 8}),
]


def asked(client: Client, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The receipt of one answer."""
    prompt = RECORD if "json" in str(fields) else SECRET
    if path.startswith("/v1"):
        body = {**fields, "max_tokens": 48, "receipt": True}
        body |= {"messages": CHAT} if path.endswith("chat/completions") else {"prompt": prompt}
        receipt: dict[str, Any] = client.post(path, body)["receipt"]
        return receipt
    parameters = {"max_new_tokens": 48, "receipt": True, **fields}
    if path == "/generate":
        return dict(client.generate(prompt, **parameters).details["receipt"])
    with client.stream(prompt, **parameters) as stream:
        tokens = [token.id for token in stream]
    receipt = stream.details["receipt"]
    assert receipt["output"]["token_ids"] == tokens
    return receipt


def replayed(url: str, path: Path, *arguments: str) -> tuple[int, str]:
    """The command's exit code and output."""
    ended = subprocess.run(
        [sys.executable, "-m", "lorikeet.launcher.cli.replay", str(path), "--url", url, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


@contextmanager
def busy(client: Client) -> Iterator[None]:
    """Other requests run inside the block."""
    is_over: list[bool] = []

    def ask(number: int) -> None:
        while not is_over:
            client.generate(SECRET * number, max_new_tokens=20, do_sample=True, adapter_id=("json", "sql")[number % 2])

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, number) for number in range(1, 4)]
        try:
            yield
        finally:
            is_over.append(True)
            for each in asking:
                each.result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("receipts")


@pytest.fixture(scope="module")
def server(replicas: Replicas) -> Launched:
    return replicas.launched


@pytest.fixture(scope="module")
def receipts(server: Launched, folder: Path) -> Path:
    """A file of receipts of requests that ran at once."""
    client = Client(server.url)
    with ThreadPoolExecutor(len(ASKED)) as pool:
        found = list(pool.map(lambda each: asked(client, *each), ASKED))
    path = folder / "receipts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in found))
    return path


@pytest.mark.long
def test_replays_are_identical_on_any_replica_under_load(server: Launched, receipts: Path) -> None:
    with busy(Client(server.url)):
        for _ in range(2):
            code, printed = replayed(server.url, receipts)
            assert (code, printed.splitlines()[-1]) == (0, f"{len(ASKED)} of {len(ASKED)} identical"), printed


def operators_lines(replicas: Replicas, receipts: Path) -> str:
    """The operator's file once it has the lines of all `receipts`: each is written after its answer."""
    ids = [receipt.request_id for receipt in found_in(receipts.read_text())]
    end = time.monotonic() + 60
    while not all(each in (text := replicas.receipts.read_text()) for each in ids) or not text.endswith("\n"):
        assert time.monotonic() < end, "the operator's file lacks a line"
        time.sleep(0.02)
    return text


def test_the_operator_s_file_holds_no_tokens(replicas: Replicas, receipts: Path) -> None:
    text = operators_lines(replicas, receipts)
    assert '"token_ids"' not in text and "zyzzyva" not in text and "Wamiko" not in text
    kept = {receipt.request_id: receipt.values for receipt in reversed(list(found_in(text)))}  # replays come later
    for receipt in found_in(receipts.read_text()):
        line = kept[receipt.request_id]
        for part in ("prompt", "output"):
            assert receipt.values[part].pop("token_ids")
        assert line["output"].pop("finish_reason") and receipt.values["output"].pop("finish_reason")
        assert {**line, "created": 0} == {**receipt.values, "created": 0}


def test_a_line_of_the_operator_s_file_is_replayed(replicas: Replicas, receipts: Path, folder: Path) -> None:
    lines = {receipt.request_id: receipt for receipt in found_in(operators_lines(replicas, receipts))}
    given = list(found_in(receipts.read_text()))
    prompts = {0: RECORD, 3: SECRET, 8: json.dumps(CHAT)}
    for index, prompt in prompts.items():
        (folder / "line.json").write_text(json.dumps(lines[given[index].request_id].values))
        (folder / "prompt").write_text(prompt)
        code, printed = replayed(replicas.launched.url, folder / "line.json", "--prompt", str(folder / "prompt"))
        assert (code, printed) == (0, f"identical: {given[index].num_tokens} tokens\n")
    (folder / "prompt").write_text("def other():")
    code, printed = replayed(replicas.launched.url, folder / "line.json", "--prompt", str(folder / "prompt"))
    assert code == 1 and "different prompt: " in printed


def test_a_modified_receipt_gives_different_tokens(server: Launched, receipts: Path, folder: Path) -> None:
    first = json.loads(receipts.read_text().splitlines()[2])
    first["parameters"]["seed"] = 1
    (folder / "changed.json").write_text(json.dumps(first))
    code, printed = replayed(server.url, folder / "changed.json")
    assert code == 1 and printed.startswith("different from token ") and "only the tokens differ" in printed


@pytest.mark.long
def test_a_server_with_another_speculative_method_is_identical(receipts: Path) -> None:
    threads = ("--cpu-memory", "256MiB", "--threads", "2", "--dtype", "float32")
    with Launched(*threads, "--speculative-method", "lookup", "--speculative-tokens", "7") as other:
        other.wait_until_ready()
        code, printed = replayed(other.url, receipts)
    assert (code, printed.splitlines()[-1]) == (0, f"{len(ASKED)} of {len(ASKED)} identical"), printed
    assert "different" not in printed


@pytest.mark.long
def test_differences_of_another_server_are_reported(receipts: Path, folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    for path in (ROOT / "demo" / "base").iterdir():
        (model / path.name).symlink_to(path)
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (model / "config.json").unlink()
    config = json.loads((ROOT / "demo" / "base" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with Launched("--model-id", str(model), *SMALL, "--dtype", "bfloat16") as other:
        other.wait_until_ready()
        fourth = folder / "fourth.json"
        fourth.write_text(receipts.read_text().splitlines()[3])
        code, printed = replayed(other.url, fourth)
        assert code == 1 and printed.startswith("different from token ")
        for part in ("base digest", "tokenizer digest", "dtype: float32, now bfloat16"):
            assert f"different {part}" in printed
        code, printed = replayed(other.url, receipts)
        assert code == 1 and "the server rejected the request: " in printed
