"""Chats with SmolLM2, whose weights are trained and whose template knows no tools, as a `.gguf` file: calls, structured
answers, and the texts of llama.cpp's server.

What needs `llama-server` runs where LLAMA_CPP names its folder, or where it is in PATH.
"""

import json
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
"""Share of equal answers; the others are near ties, which the two round differently."""


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
    """Their first tokens, for most questions."""
    with llama_server() as other:
        answers = [first_texts(server) for server in (url, other)]
    assert len(answers[0]) == 50
    assert len(set(answers[0])) >= 40  # so that equal answers are not equal by chance
    differences = [texts for texts in zip(*answers, strict=True) if texts[0] != texts[1]]
    assert len(differences) <= (1 - LEAST_EQUAL) * len(QUESTIONS), differences


def first_texts(url: str) -> list[str]:
    """The first tokens of the answer to each question."""

    def ask(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return str(message_of(url, messages=messages, max_tokens=NUM_TOKENS)[0]["content"])

    with ThreadPoolExecutor(CONCURRENCY) as threads:
        return list(threads.map(ask, QUESTIONS))
