"""Bodies, headers and framing of each API, byte for byte, in `golden/`: what changes there, clients notice.

`WRITE_GOLDEN=1 make t T=tests/router/api/test_golden.py` writes the files again.
"""

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet.proto.shard_pb2 import PooledModel
from lorikeet.proto.version import version
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio
FOLDER = Path(__file__).parent / "golden"
TEMPLATE = (
    "{% if tools %}[tools]{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}[assistant]<think></think>"
)
SAID = '<think>Rain?</think>Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
USER = [{"role": "user", "content": "Rome?"}]
CHAT: dict[str, Any] = {
    "model": MODEL_ID,
    "messages": USER,
    "seed": 1,
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
}
COMPLETION: dict[str, Any] = {"model": MODEL_ID, "prompt": "Rome?", "seed": 1, "logprobs": 1, "max_tokens": 3}
RESPONSE: dict[str, Any] = {
    "model": MODEL_ID,
    "input": "Rome?",
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
}
MESSAGE: dict[str, Any] = {
    "model": MODEL_ID,
    "messages": USER,
    "max_tokens": 400,
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
}
NATIVE: dict[str, Any] = {"inputs": "Rome?", "parameters": {"max_new_tokens": 2, "details": True, "seed": 1}}
STREAM = {"stream": True}
USAGE = {**STREAM, "stream_options": {"include_usage": True}}
CASES: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "lorax-generate": ("POST", "/generate", NATIVE),
    "lorax-generate-stream": ("POST", "/generate_stream", NATIVE),
    "lorax-tokenize": ("POST", "/tokenize", {"inputs": "Rome?"}),
    "lorax-error": ("POST", "/generate", {"inputs": "Rome?", "parameters": {"best_of": 0}}),
    "openai-completion": ("POST", "/v1/completions", COMPLETION),
    "openai-completion-stream": ("POST", "/v1/completions", {**COMPLETION, **USAGE}),
    "openai-chat": ("POST", "/v1/chat/completions", CHAT),
    "openai-chat-stream": ("POST", "/v1/chat/completions", {**CHAT, **USAGE}),
    "openai-response": ("POST", "/v1/responses", RESPONSE),
    "openai-response-stream": ("POST", "/v1/responses", {**RESPONSE, **STREAM}),
    "openai-response-error": ("POST", "/v1/responses", {**RESPONSE, "previous_response_id": "resp_1"}),
    "openai-models": ("GET", "/v1/models", None),
    "openai-error": ("POST", "/v1/chat/completions", {**CHAT, "model": "none"}),
    "openai-not-served": ("POST", "/v1/audio/speech", {}),
    "anthropic-message": ("POST", "/v1/messages", MESSAGE),
    "anthropic-message-stream": ("POST", "/v1/messages", {**MESSAGE, **STREAM}),
    "anthropic-count": ("POST", "/v1/messages/count_tokens", MESSAGE),
    "anthropic-error": ("POST", "/v1/messages", {**MESSAGE, "max_tokens": None}),
    "vllm-tokenize": ("POST", "/tokenize", {"prompt": "Rome?"}),
    "vllm-detokenize": ("POST", "/detokenize", {"tokens": [5, 6]}),
    "tgi-chat-tokenize": ("POST", "/chat_tokenize", {"messages": USER}),
}
TEXTS = ["Rome?", "Paris"]
POOLED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "openai-embeddings": ("embed", "/v1/embeddings", {"model": MODEL_ID, "input": TEXTS}),
    "openai-embeddings-base64": (
        "embed", "/v1/embeddings", {"model": MODEL_ID, "input": "Rome?", "encoding_format": "base64", "dimensions": 2}
    ),
    "openai-embeddings-error": ("embed", "/v1/embeddings", {"model": MODEL_ID, "input": TEXTS, "dimensions": 9}),
    "lorax-embed": ("embed", "/embed", {"inputs": "Rome?"}),
    "lorax-classify": ("token-classify", "/classify", {"inputs": "Rome?"}),
    "lorax-classify-batch": ("token-classify", "/classify_batch", {"inputs": TEXTS}),
    "lorax-classify-error": ("embed", "/classify", {"inputs": "Rome?"}),
    "vllm-classify": ("classify", "/classify", {"input": TEXTS}),
    "vllm-score": ("embed", "/score", {"text_1": "Rome?", "text_2": TEXTS}),
    "vllm-pooling": ("embed", "/pooling", {"input": "Rome?"}),
    "vllm-pooling-token-embed": ("embed", "/pooling", {"input": "Rome?", "task": "token_embed"}),
    "vllm-pooling-token-classify": ("classify", "/pooling", {"input": "Rome?", "task": "token_classify"}),
    "vllm-pooling-error": ("embed", "/pooling", {"input": "Rome?", "task": "classify"}),
    "cohere-embed": ("embed", "/v2/embed", {"model": MODEL_ID, "texts": TEXTS, "input_type": "search_query",
                                            "embedding_types": ["float", "base64"]}),
    "cohere-embed-error": ("embed", "/v2/embed", {"model": MODEL_ID, "texts": TEXTS, "images": ["data:"]}),
    "jina-rerank": ("embed", "/v1/rerank", {"query": "Rome?", "documents": TEXTS, "top_n": 1}),
}  # fmt: skip
"""The model's task, path and body."""
VOLATILE: dict[str, str] = {
    r"[0-9a-f]{32}": "ID",
    r'(?<="created":)\d+': "TIME",
    r'(?<="created_at":)\d+': "TIME",
    r'(?<="completed_at":)\d+': "TIME",
    r'(?<="id":")[A-Za-z0-9]{9}(?=")': "CALL",
    r'(?<="call_id":")[A-Za-z0-9]{9}(?=")': "CALL",
    re.escape(version()): "VERSION",
}
TIMES = re.compile(r"^(x-.*time.*|date): .*$", re.MULTILINE)


@pytest.fixture(scope="module")
async def server(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("golden"), chat_template=TEMPLATE) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
async def test_an_answer_is_what_it_was(server: Serving, name: str) -> None:
    # In one step, since tokens of several steps may share an event.
    server.says(SAID, ends=True, per_step=1000)
    method, path, body = CASES[name]
    response = await server.client.request(method, path, json=body)
    compare(name, shown(response.status_code, dict(response.headers), response.text))


@pytest.mark.parametrize("task", ["embed", "classify", "token-classify"])
async def test_an_answer_of_a_model_without_text(task: str, tmp_path: Path) -> None:
    size = 3 if task == "embed" else 2
    model = PooledModel(task=task, pooling="mean", size=size, is_encoder=True, is_whole=True)
    async with serving(tmp_path, pooled_model=model) as server:
        for name, (golden, path, body) in POOLED.items():
            if golden == task:
                response = await server.client.post(path, json=body)
                compare(name, shown(response.status_code, dict(response.headers), response.text))


def compare(name: str, text: str) -> None:
    golden = FOLDER / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text, name


def shown(status: int, headers: dict[str, str], body: str) -> str:
    """A response as text, without what differs from one to the next."""
    lines = [f"{key}: {value}" for key, value in sorted(headers.items()) if key != "content-length"]
    head = TIMES.sub(r"\1: TIME", "\n".join(lines))
    text = f"{status}\n{head}\n\n{body}"
    for pattern, replacement in VOLATILE.items():
        text = re.sub(pattern, replacement, text)
    return text if text.endswith("\n") else f"{text}\n"


def test_every_file_has_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == CASES.keys() | POOLED.keys()
