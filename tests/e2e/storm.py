"""A storm of requests on a running server: good, cancelled, cut, oversized and malformed ones at random.

    python -m tests.e2e.storm URL --requests 2000 --seed 0

Every answer must have the right status and body, and afterwards, when all is quiet, the server must hold nothing.
Prints one JSON line with how many of each kind there were. Knows HTTP only.
"""

import argparse
import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

JSON = {"content-type": "application/json"}
MALFORMED: dict[str, tuple[bytes, int]] = {
    "bad JSON": (b'{"inputs": "Hi"', 400),
    "invalid UTF-8": (b'{"inputs": "\xff\xfe\x00"}', 400),
    "huge number": (b'{"inputs": "Hi", "parameters": {"temperature": 1e999}}', 400),
    "not finite": (b'{"inputs": "Hi", "parameters": {"temperature": 1e300}}', 422),
    "NaN": (b'{"inputs": "Hi", "parameters": {"top_p": NaN}}', 400),
    "wrong type": (b'{"inputs": ["Hi"]}', 422),
    "wrong parameter": (b'{"inputs": "Hi", "parameters": {"max_new_tokens": "many"}}', 422),
    "negative": (b'{"inputs": "Hi", "parameters": {"max_new_tokens": -5}}', 422),
    "huge integer": (b'{"inputs": "Hi", "parameters": {"max_new_tokens": 99999999999999999999}}', 422),
    "no body": (b"", 400),
    "deep": (b'{"inputs": ' + b"[" * 50_000, 400),
    "empty": (b'{"inputs": ""}', 422),
    "broken rule": (b'{"inputs": "Hi", "parameters": {"top_k": 0}}', 422),
}


class Wrong(Exception):
    """An answer that is not the right one."""


class Storm:
    """One run against one server."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._client = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=64))
        self.counts: Counter[str] = Counter()

    async def run(self, num_requests: int, concurrency: int = 48) -> None:
        """All of them, then quiet. Raises Wrong."""
        kinds = [self._draw() for _ in range(num_requests)]
        gate = asyncio.Semaphore(concurrency)

        async def one(name: str, act: Callable[[], Awaitable[None]]) -> None:
            async with gate:
                try:
                    await act()
                except (httpx.HTTPError, Wrong) as error:
                    raise Wrong(f"{name}: {type(error).__name__} {error}") from error
            self.counts[name] += 1

        async with self._client:
            await asyncio.gather(*(one(name, act) for name, act in kinds))
            await self._until_quiet()

    def _draw(self) -> tuple[str, Callable[[], Awaitable[None]]]:
        chance = self._random.random()
        if chance < 0.34:
            return "cancelled", self._cancelled(self._generation(), self._random.random() * 0.3)
        if chance < 0.42:
            return "cut", self._cut(self._random.randrange(1, 40))
        if chance < 0.62:
            name = self._random.choice(list(MALFORMED))
            return "malformed", self._malformed(name)
        if chance < 0.63:
            return "three megabytes", self._large(3_000_000, 200)
        if chance < 0.64:
            return "oversized", self._large(17 * 1024 * 1024, 413)
        return "good", self._good(self._generation())

    def _generation(self) -> tuple[str, dict[str, Any]]:
        """A route and a body that it must answer."""
        count = self._random.randint(1, 24)
        text = "".join(self._random.choices("abcdef \0é🦜", k=self._random.randint(1, 200)))
        parameters = {"max_new_tokens": count, "details": True, "ignore_eos_token": True}
        openai = {"model": "", "max_tokens": count, "ignore_eos_token": True}
        sampling = {"do_sample": True, "top_k": 5, "best_of": 2}
        return self._random.choice(
            [
                ("/generate", {"inputs": text, "parameters": parameters}),
                ("/generate", {"inputs": text, "parameters": {**parameters, **sampling}}),
                ("/generate", {"inputs": text, "parameters": {**parameters, "decoder_input_details": True}}),
                ("/generate_stream", {"inputs": text, "parameters": parameters}),
                ("/v1/completions", {**openai, "prompt": [text, "x"], "n": 2}),
                ("/v1/completions", {**openai, "prompt": text, "stream": True}),
                ("/v1/chat/completions", {**openai, "messages": [{"role": "user", "content": text}], "stream": True}),
            ]
        )

    def _good(self, generation: tuple[str, dict[str, Any]]) -> Callable[[], Awaitable[None]]:
        path, body = generation

        async def act() -> None:
            response = await self._client.post(path, json=body)
            _check(response.status_code == 200, response.text)
            _check_counts(path, body, response.text)

        return act

    def _cancelled(self, generation: tuple[str, dict[str, Any]], seconds: float) -> Callable[[], Awaitable[None]]:
        path, body = generation
        if "parameters" in body:
            body["parameters"]["max_new_tokens"] = 400

        async def act() -> None:
            # A connection of its own: leaving it is what closes it.
            async with httpx.AsyncClient(base_url=self._url, timeout=600) as client:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await client.post(path, json=body)

        return act

    def _cut(self, num_bytes: int) -> Callable[[], Awaitable[None]]:
        """The connection ends within the body."""

        async def act() -> None:
            parts = urlsplit(self._url)
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            head = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n"
            writer.write(head.encode() + b'{"inputs": "Hi", "parameters": {"max_new_tokens": 5}}'[:num_bytes])
            await writer.drain()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        return act

    def _malformed(self, name: str) -> Callable[[], Awaitable[None]]:
        body, status = MALFORMED[name]

        async def act() -> None:
            response = await self._client.post("/generate", content=body, headers=JSON)
            _check(response.status_code == status, f"{name}: {response.status_code} {response.text}")

        return act

    def _large(self, num_bytes: int, status: int) -> Callable[[], Awaitable[None]]:
        body = {"inputs": "Hi", "parameters": {"max_new_tokens": 1}, "padding": "x" * num_bytes}

        async def act() -> None:
            response = await self._client.post("/generate", json=body)
            _check(response.status_code == status, f"{response.status_code} {response.text[:200]}")

        return act

    async def _until_quiet(self) -> None:
        """All queues empty and all pages free, within a minute."""
        held: dict[str, float] = {}
        for _ in range(600):
            response = await self._client.get("/metrics", headers={"accept": "application/json"})
            families = response.json()
            held = {name: families[name]["data"][0]["value"] for name in HELD if name in families}
            _check(set(held) == set(HELD), f"no metric of {set(HELD) - set(held)}")
            if not any(held.values()):
                break
            await asyncio.sleep(0.1)
        _check(not any(held.values()), f"still held when idle: {held}")
        _check((await self._client.get("/startup")).status_code == 200, "the server can't generate any more")


HELD = (
    "lorikeet_active_requests",
    "lorax_queue_length",
    "lorikeet_running_requests",
    "lorikeet_shard_waiting_requests",
    "lorikeet_kv_pages_used",
)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def _check_counts(path: str, body: dict[str, Any], text: str) -> None:
    """As many tokens as were asked for."""
    if path == "/generate":
        expected = body["parameters"]["max_new_tokens"]
        details = json.loads(text)["details"]
        _check(len(details["tokens"]) == details["generated_tokens"] == expected, text)
    elif path == "/generate_stream":
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
        _check(len(events) == body["parameters"]["max_new_tokens"], text)
        _check(events[-1]["generated_text"] is not None, text)
    elif body.get("stream"):
        _check(text.endswith("data: [DONE]\n\n"), text)
    else:
        answer = json.loads(text)
        _check(len(answer["choices"]) == 4, text)
        _check(answer["usage"]["completion_tokens"] == 4 * body["max_tokens"], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    storm = Storm(arguments.url, arguments.seed)
    asyncio.run(storm.run(arguments.requests))
    print(json.dumps({"requests": arguments.requests, "seed": arguments.seed, **storm.counts}))


if __name__ == "__main__":
    main()
