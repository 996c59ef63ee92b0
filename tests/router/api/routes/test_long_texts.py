"""Texts that are too long are rejected before they are tokenized, and delay nobody."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from lorikeet.router.text.tokenizer import MAX_WHOLE_BYTES
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

LONG = "a " * (7 << 20)
"""14 MB."""


async def latencies(server: Serving, until: asyncio.Task[Any]) -> list[float]:
    """Latencies in seconds of one small request after another, from a second client."""
    seconds = []
    while not until.done():
        start = time.monotonic()
        answer = await server.client.post("/generate", json={"inputs": "Hi", "parameters": {"max_new_tokens": 1}})
        assert answer.status_code == 200
        seconds.append(time.monotonic() - start)
    return seconds


def bodies(text: str) -> list[tuple[str, dict[str, Any], int]]:
    chat = {"model": MODEL_ID, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    predicted = {"model": MODEL_ID, "max_tokens": 1, "prompt": "Hi", "speculative_tokens": 2}
    return [
        ("/generate", {"inputs": text}, 422),
        ("/v1/completions", {"model": MODEL_ID, "prompt": text}, 400),
        ("/v1/completions", {"model": MODEL_ID, "prompt": ["Hi", text]}, 400),
        ("/v1/chat/completions", chat, 400),
        ("/v1/completions", {**predicted, "prediction": {"type": "content", "content": text}}, 400),
        ("/tokenize", {"inputs": text}, 422),
    ]


async def test_texts_that_are_too_long_are_not_tokenized(tmp_path: Path) -> None:
    async with serving(tmp_path, max_concurrent_requests=64) as server:
        server.says("x")
        tokenized: list[int] = []
        run = server.service.tokenizer.pool.run

        async def counted(work: Any, caller: str, num_chars: int) -> Any:
            tokenized.append(num_chars)
            return await run(work, caller, num_chars)

        server.service.tokenizer.pool.run = counted  # type: ignore[method-assign]

        async def attack() -> None:
            for path, body, status in bodies(LONG):
                answer = await server.client.post(path, json=body)
                assert (answer.status_code, len(answer.content) < 1000) == (status, True), (path, answer.text)
                assert "at least" in answer.text or "at most" in answer.text

        attacker = asyncio.create_task(attack())
        seconds = await latencies(server, attacker)
        await attacker
        assert max(tokenized, default=0) <= 2
        assert len(seconds) >= 5


async def test_the_end_of_a_long_text_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        server.says("x")
        text = "the there " * 100_000
        parameters = {"truncate": 50, "max_new_tokens": 1, "decoder_input_details": True}
        answer = await server.client.post("/generate", json={"inputs": text, "parameters": parameters})
        assert answer.status_code == 200
        assert list(server.shard.submits[-1].prompt_ids) == server.ids(text)[-50:]
        answer = await server.client.post("/generate", json={"inputs": "a" * (2 << 20), "parameters": parameters})
        assert answer.status_code == 422
        assert "cannot be truncated" in answer.json()["error"]


async def test_a_text_that_can_be_tokenized_gets_its_offsets(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        text = "there a " * 500
        tokens = (await server.client.post("/tokenize", json={"inputs": text})).json()
        assert [token["id"] for token in tokens] == server.ids(text)
        assert text[tokens[-1]["start"] : tokens[-1]["stop"]] == tokens[-1]["text"].replace("Ġ", " ")
        assert (await server.client.post("/tokenize", json={"inputs": ""})).json() == []
        answer = await server.client.post("/tokenize", json={"inputs": "é" * (MAX_WHOLE_BYTES // 2 + 1)})
        assert (answer.status_code, str(MAX_WHOLE_BYTES) in answer.text) == (422, True)
