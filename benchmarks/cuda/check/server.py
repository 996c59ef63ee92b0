"""The whole server over HTTP: the embedded model with its adapters, and the small model against its engine alone."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.cuda import engines
from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.setup import Setup

START_S, END_S, ANSWER_S = 90.0, 8.0, 30.0
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
MOST_TOKENS = 128
SHOWN = ("Output token throughput", "Mean TTFT", "Median TPOT", "Median ITL", "P99 ITL", "Failed")


class Server:
    """A launcher with its children, on a free port."""

    def __init__(self, rows: Rows, setup: Setup, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._is_slow = not setup.is_cuda
        device = "cuda" if setup.is_cuda else "cpu"
        self._command = [sys.executable, "-m", "lorikeet.launcher", "--port", str(self.port), "--hostname", "127.0.0.1",
                         "--device", device, *flags]  # fmt: skip
        self._log = rows.log("server")
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator["Server"]:
        with self._log.open("w") as log:
            # the interpreter of kernels is for this process alone
            environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
            process = subprocess.Popen(self._command, stdout=log, stderr=log, process_group=0, env=environment)
            self._process = process
            try:
                yield self
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait(self) -> Row:
        """Until it is ready. Raises RuntimeError if it ends before, TimeoutError."""
        start = time.monotonic()
        while time.monotonic() - start < START_S * (3 if self._is_slow else 1):
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the server ended: {self._log.read_text()[-200:]}")
            with contextlib.suppress(OSError):
                self.ask("/health")
                return {"start_s": time.monotonic() - start}
            time.sleep(0.25)
        raise TimeoutError(f"the server was not ready: {self._log.read_text()[-200:]}")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer, as JSON where it is."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def names(self) -> list[str]:
        return [model["id"] for model in self.ask("/v1/models")["data"]]


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    with Server(rows, setup, "--speculative-tokens", "3").running() as server:
        rows.check("start", server.wait, is_needed=True)
        rows.check("texts of all adapters", lambda: _texts(server))
        rows.check("forced JSON", lambda: _forced(server))
        rows.check("load of all adapters", lambda: _load(server, 64 if setup.is_cuda else 2))


def _texts(server: Server) -> Row:
    body = {"prompt": "The sum of two and two is", "max_tokens": 16, "temperature": 0}
    texts = [server.ask("/v1/completions", {"model": name, **body})["choices"][0]["text"] for name in server.names()]
    return {"ok": len(set(texts)) > 1, "models": len(texts), "texts": len(set(texts))}


def _forced(server: Server) -> Row:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "A person"}], "max_tokens": 60, "temperature": 0}
    answer = server.ask("/v1/chat/completions", {"model": server.names()[0], "response_format": form, **body})
    text = answer["choices"][0]["message"]["content"]
    return {"ok": set(json.loads(text)) == {"name", "age"}, "text": text}


def _load(server: Server, at_once: int) -> Row:
    names = server.names()
    bodies = [
        {"model": names[at % len(names)], "prompt": f"Question {at}: what is a lorikeet?", "max_tokens": 64,
         "temperature": 0, "ignore_eos": True}
        for at in range(4 * at_once)
    ]  # fmt: skip

    def ask(body: dict[str, Any]) -> int:
        return int(server.ask("/v1/completions", body)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, bodies[:at_once]))
        start = time.monotonic()
        num_tokens = sum(pool.map(ask, bodies))
    return {"requests": len(bodies), "tok_s": num_tokens / (time.monotonic() - start)}


def check_served(rows: Rows, setup: Setup, is_brief: bool) -> None:
    """Measure over HTTP what the stage `small` measures in process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows.check("write the model", lambda: _write(setup, folder), is_needed=True)
        with Server(rows, setup, "--model-id", name).running() as server:
            rows.check("start", server.wait, is_needed=True)
            for count in (1, 16, 64, 256) if setup.is_cuda else (1, 2):
                rows.check(f"served {count}", partial(_measured, server, setup, folder, count))


def _write(setup: Setup, folder: Path) -> Row:
    """The small model with random weights, and a tokenizer of its vocabulary."""
    vocabulary = {f"w{index}": index for index in range(setup.small.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "w0", "eos_token": "w1", "bos_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = LlamaConfig(**{**setup.small.config(), "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0})
    dtype = getattr(torch, setup.dtype)
    network: Any = engines.random_network(config, dtype, setup.device, setup.seed, attention="sdpa")
    network.save_pretrained(folder)
    del network
    if setup.is_cuda:
        torch.cuda.empty_cache()
    return {"gb": sum(file.stat().st_size for file in folder.iterdir()) / 1e9}


def _measured(server: Server, setup: Setup, folder: Path, count: int) -> Row:
    command = [
        sys.executable, "-m", "lorikeet.launcher.bench.main", "run", "--url", f"http://127.0.0.1:{server.port}",
        "--tokenizer", str(folder), "--num-prompts", str(max(4, 4 * count)), "--max-concurrency", str(count),
        "--input-len", str(setup.prompt), "--output-len", str(min(setup.text, MOST_TOKENS)),
        "--num-warmups", str(min(count, 64)), "--no-progress",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        return {"ok": False, "error": (ended.stdout + ended.stderr).strip()[-250:]}
    found: Row = {}
    for line in ended.stdout.splitlines():
        label, number = line.rpartition(":")[0], re.search(r"[\d.]+", line.rpartition(":")[2])
        if number is not None and label.startswith(SHOWN):
            found["tok_s" if label.startswith(SHOWN[0]) else label] = float(number[0])
    return {"ok": "tok_s" in found, **found}
