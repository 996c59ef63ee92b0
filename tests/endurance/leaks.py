"""Thousands of requests to one server, a third cancelled at random moments, others truncated, oversized or malformed.

The server must stay up, give every answer its right status and body, and hold no page when idle.
"""

import asyncio
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence

import uvloop

from benchmarks.evidence.figure import Case
from benchmarks.load import servers
from tests.endurance.hostile_requests import Attempt, attempt

MODEL = servers.REPOSITORY / "demo" / "base"
BATCHES, BATCH = 10, 200
CLIENTS = 24
IDLE_S = 30.0
ANSWER_S = 120.0
SEED = 9_000
INSIDE = (
    "lorikeet_active_requests",
    "lorax_queue_length",
    "lorikeet_running_requests",
    "lorikeet_shard_waiting_requests",
)


def batch(server: servers.RunningServer, number: int, count: int) -> Case:
    """Send a batch, wait until the server says it is idle, and read how many pages requests still hold."""
    draw = random.Random(SEED + number)
    attempts = [attempt(draw, leaves=index % 3 == 0) for index in range(count)]
    draw.shuffle(attempts)
    wrong = uvloop.run(send_all(server.port, attempts))
    raw = {
        "requests": count,
        "kinds": dict(sorted(Counter(tried.kind for tried in attempts).items())),
        "wrong": wrong,
        "alive": server.alive(),
        **(idle_pages(server.port) if server.alive() else {"pages_held": -1}),
    }
    error = "" if raw["alive"] else f"server ended: {servers.tail(server.log)}"
    return Case(f"batch {number}", raw, error)


async def send_all(port: int, attempts: Sequence[Attempt]) -> list[str]:
    """Send by `CLIENTS` clients at once; what was answered wrongly, as text."""
    waiting = iter(attempts)
    wrong: list[str] = []

    async def client() -> None:
        for tried in waiting:
            if result := await send(port, tried):
                wrong.append(f"{tried.kind}: {result}")

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return wrong


async def send(port: int, tried: Attempt) -> str:
    """One request; an empty text where all was right or nobody waited for the answer."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    try:
        writer.write(tried.payload)
        if tried.leaves_after_s is not None:
            await asyncio.sleep(tried.leaves_after_s)
            writer.transport.abort() if tried.leaves_after_s < 0.5 else writer.close()
            return ""
        async with asyncio.timeout(ANSWER_S):
            return validated(tried, await reader.read())
    except (OSError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        writer.close()


def validated(tried: Attempt, answer: bytes) -> str:
    try:
        head, _, rest = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        body = _unchunked(rest) if b"transfer-encoding: chunked" in head.lower() else rest
        right = tried.right(status, body)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error} in {answer[:300]!r}"
    return "" if right else f"{answer[:300]!r}"


def _unchunked(data: bytes) -> bytes:
    parts: list[bytes] = []
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(parts)
        parts.append(data[:length])
        data = data[length + 2 :]


def idle_pages(port: int) -> dict[str, float]:
    """Wait until no request is inside; pages that requests still hold then, of how many, and requests still inside."""
    until = time.monotonic() + IDLE_S
    while True:
        now = gauges(port)
        inside = sum(now[name] for name in INSIDE)
        if not inside + now["lorikeet_kv_pages_used"] or time.monotonic() > until:
            return {
                "pages_held": now["lorikeet_kv_pages_used"],
                "pages": now["lorikeet_kv_pages"],
                "requests_inside": inside,
            }
        time.sleep(0.2)


def gauges(port: int) -> dict[str, float]:
    """Every sample of `/metrics` without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in pairs}
