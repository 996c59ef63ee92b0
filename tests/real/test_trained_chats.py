"""Chats with SmolLM2, whose weights are trained and whose template knows no tools, as a `.gguf` file: calls, structured
answers, and the texts of llama.cpp's server.

What needs `llama-server` runs where LLAMA_CPP names its folder, or where it is in PATH.
"""

import json
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from transformers import AutoTokenizer

from tests.real import families, models
from tests.real.test_chat_families import FORCED, LOOSE, PARAMETERS, QUESTION, SCHEMAS, TOOLS, TURNS
from tests.shard.model.gguf.files import answer_of

pytestmark = pytest.mark.real

SERVER = os.environ.get("LLAMA_CPP", "") and str(Path(os.environ["LLAMA_CPP"]) / "llama-server")
SERVER = SERVER if Path(SERVER).is_file() else shutil.which("llama-server") or ""
ANSWERED = ("enum", "bounded integer", "pattern", "array", "nested", "optional", "any of objects", "escapes")
"""Schemas whose answers are short, whatever the model writes."""
CONCURRENCY = 10
MAX_TOKENS = 100
NUM_TOKENS = 20
"""Tokens of an answer that are compared with llama.cpp's."""
PLACES = ("France", "Japan", "Italy", "Egypt", "Brazil", "Canada", "India", "Kenya", "Spain", "Norway")
QUESTIONS = [
    form.format(place)
    for form in (
        "What is the capital of {}?", "Name one food from {}.", "Write one sentence about {}.",
        "Which language is spoken in {}?", "Name a river or a lake in {}.",
    )
    for place in PLACES
]  # fmt: skip
LEAST_EQUAL = 0.9
"""Share of answers that are equal, or that differ first in a near tie, which the two round differently."""
NEAR_TIE = 0.3
"""Difference of two logits that rounding turns around: neither token is 1.35 times as likely as the other."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the launcher makes for the model's file."""
    path = tmp_path_factory.mktemp("smollm2") / "served"
    assert "error" not in answer_of(models.gguf_file("smollm2"), path)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with families.serving(folder, folder.parent) as served:
        yield served


def message_of(url: str, **body: Any) -> tuple[dict[str, Any], str]:
    """The message of a chat, and why it ended."""
    common = {"model": "", "messages": [QUESTION], "temperature": 0, "max_tokens": MAX_TOKENS}
    answer = httpx.post(f"{url}/v1/chat/completions", json={**common, **body}, timeout=300)
    assert answer.status_code == 200, (answer.text, body)
    (choice,) = answer.json()["choices"]
    return choice["message"], choice["finish_reason"]


def check_calls(message: dict[str, Any]) -> None:
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS[call["function"]["name"]])


@pytest.mark.parametrize("messages", [[QUESTION], TURNS], ids=["one turn", "several turns"])
def test_every_call_is_valid(url: str, messages: list[dict[str, Any]]) -> None:
    for kind, fields in FORCED.items():
        message, reason = message_of(url, messages=messages, tools=TOOLS, **fields)
        if kind == "parallel" and reason == "length":  # greedy text may repeat calls until it is cut
            continue
        assert message["tool_calls"], (kind, message, reason)
        check_calls(message)
        if kind == "named":
            assert message["tool_calls"][0]["function"]["name"] == "weather"
    for tools in (TOOLS, LOOSE):
        message, reason = message_of(url, messages=messages, tools=tools, tool_choice="auto")
        assert message.get("tool_calls") or message["content"], (message, reason)
        if tools is TOOLS and message.get("tool_calls") and reason != "length":
            check_calls(message)


@pytest.mark.parametrize("name", ANSWERED)
def test_every_structured_answer_matches_its_schema(url: str, name: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[name]}}
    message, reason = message_of(url, response_format=schema)
    assert reason == "stop", message
    jsonschema.validate(json.loads(message["content"]), SCHEMAS[name])


@contextmanager
def llama_server() -> Iterator[str]:
    """The URL of llama.cpp's server of the same file, with its own chat template."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [SERVER, "-m", models.gguf_file("smollm2"), "--host", "127.0.0.1", "--port", port, "--jinja"]
    command += ["-c", 1024, "-np", 1, "-t", 1, "-tb", 1, "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-webui"]
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            assert server.poll() is None, f"llama-server ended with {server.returncode}"
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(not SERVER, reason="neither LLAMA_CPP nor PATH has llama.cpp's llama-server")
def test_answers_are_those_of_llama_cpp(url: str) -> None:
    """Their first tokens, for most questions. Where the two choose different tokens, the same weights without rounded
    activations find both about as likely.
    """
    with llama_server() as other:
        answers = [first_tokens(url, return_token_ids=True), first_tokens(other, logprobs=True)]
    assert len({tuple(ids) for ids in answers[0]}) >= 40  # so that equal answers are not equal by chance
    reference = models.network(models.folder("smollm2", "float32"), "float32")
    gaps = [gap_of(reference, *texts) for texts in zip(QUESTIONS, *answers, strict=True)]
    print(f"{gaps.count(0.0)} of {len(gaps)} answers are equal; the other gaps: {sorted(gap for gap in gaps if gap)}")
    assert sum(gap <= NEAR_TIE for gap in gaps) >= LEAST_EQUAL * len(QUESTIONS), gaps


def first_tokens(url: str, **fields: Any) -> list[list[int]]:
    """The ids of the first tokens of the answer to each question. `fields`: ask for them."""

    def ask(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        body = {"model": "", "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, **fields}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        (choice,) = answer.raise_for_status().json()["choices"]
        ids = choice.get("token_ids") or [token["id"] for token in choice["logprobs"]["content"]]
        return list(map(int, ids))

    with ThreadPoolExecutor(CONCURRENCY) as threads:
        return list(threads.map(ask, QUESTIONS))


def gap_of(reference: Any, question: str, ours: list[int], theirs: list[int]) -> float:
    """The difference of the logits of the first two tokens that differ; 0 for equal answers."""
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if first is None:
        return 0.0 if len(ours) == len(theirs) else math.inf
    tokenizer = AutoTokenizer.from_pretrained(models.folder("smollm2", "float32"))
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *ours[:first]]])).logits[0, -1]
    return abs(float(logits[ours[first]] - logits[theirs[first]]))
