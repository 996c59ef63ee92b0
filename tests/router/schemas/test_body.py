"""The cost of a body's values before it is parsed."""

import sys
import tracemalloc
from typing import Any

import orjson
import pytest

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import BodyTooDetailed, WrongJsonType
from lorikeet.router.schemas.body import _exact_values_size, _values_size
from lorikeet.router.schemas.openai import ChatCompletionRequest

N = 20_000
BODIES = {
    "numbers": b"[" + b",".join([b"1.5"] * N) + b"]",
    "large integers": b"[" + b",".join([b"1000000007"] * N) + b"]",
    "lists": b"[" + b",".join([b"[1000]"] * N) + b"]",
    "empty lists": b"[" + b",".join([b"[]"] * N) + b"]",
    "objects": b"[" + b",".join([b'{"a":"b"}'] * N) + b"]",
    "empty objects": b"[" + b",".join([b"{}"] * N) + b"]",
    "texts": b"[" + b",".join([b'"abcdefgh"'] * N) + b"]",
    "names": b"{" + b",".join(b'"%d":0' % index for index in range(N)) + b"}",
}


def memory_of(value: Any) -> int:
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(sys.getsizeof(name) + memory_of(field) for name, field in value.items())
    return size + sum(map(memory_of, value)) if isinstance(value, list) else size


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_cost_covers_the_parsed_values(body: bytes) -> None:
    assert _values_size(body, 1 << 30) + len(body) >= 0.75 * memory_of(orjson.loads(body))


MESSAGES: dict[str, list[dict[str, Any]]] = {
    "messages": [{"role": "user", "content": ""}] * N,
    "parts": [{"role": "user", "content": [{"type": "text", "text": ""}] * N}],
    "calls": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f"}}] * N}],
    "messages without a role": [{}] * N,
}


@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES)
def test_the_cost_covers_the_models_of_a_conversation(messages: list[dict[str, Any]]) -> None:
    config = RouterConfig(
        model_id="m", model_path="", shard_addresses=(), max_total_tokens=10 * N, max_input_length=9 * N
    )
    body = orjson.dumps({"model": "m", "messages": messages})
    tracemalloc.start()
    try:
        values = orjson.loads(body)
        if messages[0]:
            ChatCompletionRequest.read(values, config).to_request(config)
        else:
            with pytest.raises(WrongJsonType):
                ChatCompletionRequest.read(values, config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert _values_size(body, 1 << 30) + len(body) >= 0.75 * peak


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_of_many_values_is_rejected(body: bytes) -> None:
    with pytest.raises(BodyTooDetailed):
        _values_size(body, 500_000)


def test_characters_inside_texts_cost_nothing() -> None:
    for text in ('a,[{"' * 100_000, "\\" * 200_000, '\\"' * 100_000, ("x" * 65535 + "\\") * 3, '"\\\\"' * 70_000):
        body = orjson.dumps({"inputs": text, "ids": [1, 2, 3]})
        exact = _exact_values_size(body, 1 << 30)
        assert exact == 800 + 64 + 3 * 40 + 6 * 28, text[:5]
        assert _values_size(body, 1200) <= 1200
