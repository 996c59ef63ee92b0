"""Bad requests leave nothing behind: their bodies are freed at once, and caches of refusals are bounded."""

import asyncio
import gc
import traceback
import tracemalloc
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.adapters.refs import Pin, SourceKind
from lorikeet.adapters.sized_cache import ENTRY_BYTES, SizedCache
from lorikeet.adapters.sources.registry import (
    MAX_REFUSED_BYTES,
    MAX_REJECTED_BYTES,
    MAX_RESOLVED_BYTES,
    rejected_versions,
)
from lorikeet.proto.process import return_freed_memory
from lorikeet.router.adapters import chat_templates, loading, tokenizers
from lorikeet.router.adapters.chat_templates import OwnTemplates
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

AT_ONCE = 4
MAX_GROWTH = 8 << 20
"""Bytes of requests that are being answered, and of caches that fill. The bodies of one kind of request take 20 MB."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, adapters=True, admin_key_sha256=sha256("admin")) as started:
        started.adapter("one")
        yield started


@contextmanager
def traced() -> Iterator[None]:
    """Python's allocations are counted."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage is not collected."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def allocated_bytes() -> int:
    """What is allocated within `traced`, without what httpx allocated: its client holds bodies in reference cycles.

    Unlike resident memory, it does not depend on what the C library keeps, nor on when garbage is collected.
    """
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*/httpx/*")])
    return sum(trace.size for trace in snapshot.traces)


def tracebacks() -> list[types.TracebackType]:
    gc.collect()
    return [item for item in gc.get_objects() if isinstance(item, types.TracebackType)]


def resident_bytes() -> int:
    gc.collect()
    return_freed_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) << 12


def bad(number: int, size: int) -> dict[str, Any]:
    """Arguments of a request that is refused, of one of several kinds."""
    text, absent = "x" * size, f"absent-{number}"
    kinds: list[dict[str, Any]] = [
        {"url": "/generate", "json": {"inputs": text, "parameters": {"adapter_id": absent}}},
        {"url": "/v1/completions", "json": {"model": absent, "adapter_source": "local", "prompt": text}},
        {"url": "/v1/chat/completions", "json": {"model": absent, "messages": [{"role": "user", "content": text}]}},
        {"url": "/generate", "json": {"inputs": text, "parameters": {"temperature": -1}}},
        {"url": "/generate", "content": f'{{"inputs": "{text}"', "headers": {"content-type": "application/json"}},
        {"url": "/generate_stream", "json": {"inputs": text, "parameters": {"adapter_id": absent}}},
        {"url": "/v1/messages", "json": {"model": absent, "max_tokens": 1, "messages": [], "system": text}},
        {"url": f"/v1/streams/{absent}", "json": {"inputs": text}},
        {"url": "/generate", "json": {"inputs": text}, "headers": {"x-lorikeet-resumable": "9" * 5002}},
        {"url": "/admin/adapters/load", "json": {"adapter_id": text}, "headers": {"authorization": f"Bearer {absent}"}},
        {"url": "/v1/load_lora_adapter", "json": {"lora_name": text, "lora_path": absent}},
        {"url": "/tokenize", "json": {"prompt": [text]}},
    ]
    return kinds[number % len(kinds)]


async def send(server: Serving, numbers: range, size: int) -> set[int]:
    """Send bad requests, several at once; their statuses."""
    statuses, waiting = set[int](), iter(numbers)

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for number in waiting:
                answer = await client.post(**bad(number, size))
                statuses.add(answer.status_code)
                assert answer.status_code < 500, answer.text
                assert answer.status_code != 200 or "error" in answer.text

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return statuses


async def test_bad_requests_keep_no_bodies(server: Serving) -> None:
    """240 MB of them. No cycle of references holds one: a router collects garbage seldom."""
    with traced(), uncollected():
        await send(server, range(240), 1000)
        await send(server, range(1000, 1024), 1_000_000)
        before = allocated_bytes()
        assert {400, 404, 422} <= await send(server, range(2000, 2240), 1_000_000)
        assert allocated_bytes() - before < MAX_GROWTH


async def test_nothing_keeps_an_exception_after_its_request(server: Serving) -> None:
    """An exception holds its traceback, that the frames of its request, and those the body."""
    earlier = tracebacks()  # other tests': pytest keeps exceptions of failed tests, and those that are parameters
    known = set(map(id, earlier))
    await send(server, range(120), 1000)
    kept = [item for item in tracebacks() if id(item) not in known]
    lines = [line for item in kept for line in traceback.format_tb(item, 1)]
    assert [line for line in lines if "lorikeet" in line or "/router/" in line] == []


@pytest.mark.parametrize(("source", "num_kept"), [("s3", 100), ("local", 0)])
async def test_refusals_are_bounded_in_bytes(server: Serving, source: str, num_kept: int) -> None:
    """Those of remote sources are cached. Those of local folders, which cost one look at a disk, are not."""
    rights = server.service.rights
    for number in range(100):
        parameters = {"adapter_id": f"{'x' * 450}{number}", "adapter_source": source}
        answer = await server.client.post("/generate", json={"inputs": "a", "parameters": parameters})
        assert answer.status_code == 404
    assert len(rights._refusals) == num_kept
    assert num_kept * 450 <= rights._refusals.num_bytes <= MAX_REFUSED_BYTES
    assert len(rights._answers) == 0, "names that do not exist displace no others"


async def test_what_is_known_of_adapters_is_bounded_in_bytes(server: Serving) -> None:
    """Each cache is filled with more than it may hold."""
    text = "x" * 1_000_000
    rights = server.service.rights
    resolved = SimpleNamespace(resolved=SimpleNamespace(real_id=text))
    added = SimpleNamespace(tokens=range(20_000))
    caches: list[tuple[Any, int, Any]] = [
        (rights._answers, MAX_RESOLVED_BYTES, resolved),
        (rights._refusals, MAX_REFUSED_BYTES, {"message": text}),
        (server.service.templates._own, chat_templates.MAX_CACHED_BYTES, OwnTemplates(chat=text)),
        (server.service.tokenizers._added, tokenizers._MAX_CACHED_BYTES, added),
        (rejected_versions(), MAX_REJECTED_BYTES, 0.0),
    ]
    for cache, limit, value in caches:
        for number in range(100):
            pin = Pin(SourceKind.S3, f"{number}{text}", "revision")
            cache.put((pin, "") if cache in (rights._answers, rights._refusals) else pin, value)
        assert limit // 2 < cache.num_bytes <= limit and 0 < len(cache) < 100


async def test_the_contents_that_are_known_are_limited(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_KNOWN", 2)
    server.says("x")
    for name in ("two", "three"):
        server.adapter(name)
    for name in ("one", "two", "three", "one"):
        parameters = {"adapter_id": name, "adapter_source": "local", "max_new_tokens": 1}
        assert (
            await server.client.post("/generate", json={"inputs": "a", "parameters": parameters})
        ).status_code == 200
    assert len(server.service.admission.loading._known) == 2
    assert len(server.loader.asked) == 4, "one that was forgotten is asked for again"


def test_a_cache_forgets_what_is_old_and_what_is_too_much() -> None:
    now = 0.0
    cache: SizedCache[int, str] = SizedCache(4 * ENTRY_BYTES + 100, lambda key, value: len(value), 10, lambda: now)
    for key in range(5):
        now = float(key)
        cache.put(key, "x" * 20)
    assert [key for key, _ in cache.items()] == [1, 2, 3, 4] and cache.num_bytes == 4 * ENTRY_BYTES + 80
    cache.put(5, "x" * 10_000)
    assert len(cache) == 0 and cache.num_bytes == 0, "one that has no room is not kept"
    cache.put(6, "a")
    now = 14.0
    assert cache.get(6) is None and len(cache) == 0
    cache.put(7, "a")
    now = 30.0
    cache.put(8, "b")
    assert [key for key, _ in cache.items()] == [8], "old entries go without being asked for"
    recent: SizedCache[int, str] = SizedCache(2 * ENTRY_BYTES + 2, lambda key, value: len(value))
    recent.put(1, "a")
    recent.put(2, "b")
    assert recent.get(1) == "a"
    recent.put(3, "c")
    assert [key for key, _ in recent.items()] == [1, 3], "without a time, the least recently used goes first"


@pytest.mark.long
async def test_fifty_thousand_bad_requests(server: Serving) -> None:
    await send(server, range(2000), 20_000)
    before = resident_bytes()
    await send(server, range(2000, 52_000), 20_000)
    await asyncio.sleep(1)
    assert resident_bytes() - before < 64 << 20
