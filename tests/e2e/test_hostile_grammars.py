"""Hostile grammars against a whole server: right answers or refusals, another user's streams go on, memory returns."""

import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.attacks.test_attacks import resident_mb
from tests.e2e.conftest import EXACT, Replicas
from tests.e2e.launched import Launched
from tests.oracles.hostile_grammars import Hostile, hostile

SEED = 24
NUM_CALLERS = 8
NUM_BUSY = 5
"""Most times that a busy server is asked again."""
STALL_S = 2.0
"""A pause of a stream of that length is a stall: compilations of these grammars take seconds."""
MEMORY_MB = 200.0
"""Kept compiled grammars included."""
REFUSALS = (422, 413)
FAILURE = "the grammar"
"""In the message of a request that failed while it was generated, because a limit of the grammar was reached."""


@dataclass
class Canary:
    """What another user saw, who streams all the time without a grammar."""

    texts: set[str] = field(default_factory=set)
    pauses: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def post(port: int, number: int, body: object, path: str = "/generate") -> tuple[int, str]:
    """Status and body of an answer to the caller of that number, who has an address of their own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120, source_address=(f"127.0.2.{number}", 0))
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def ask(port: int, number: int, wanted: Hostile) -> tuple[int, str]:
    """What became of a hostile request, and what is wrong with that."""
    parameters = {"max_new_tokens": 24, "do_sample": True, "seed": 5, "details": True, **wanted.fields}
    for _ in range(NUM_BUSY):
        status, text = post(port, 1 + number % NUM_CALLERS, {"inputs": "x = ", "parameters": parameters})
        if status != 429:
            break
        time.sleep(0.25)
    if status == 200:
        found = json.loads(text)
        has_ended = found["details"]["finish_reason"] == "eos_token"
        is_wrong = has_ended and wanted.is_wrong(found["generated_text"])
        return status, f"wrong: {found['generated_text']!r}" if is_wrong else ""
    if status == 400 and "surrogate" in text:  # no JSON text has one
        return status, ""
    if status in REFUSALS:
        # LoRAX's words where a JSON type is wrong, and the whole body where it needs too much memory
        is_named = any(each in text for each in ("`", "parameters.", "the request body as JSON"))
        return status, "" if is_named else f"names no field: {text}"
    is_busy, is_limit = status == 429, status == 424 and FAILURE in text
    return status, "" if is_busy or is_limit else f"{status} {text[:300]}"


@contextmanager
def streaming(port: int) -> Iterator[Canary]:
    """One stream after another, until the block ends."""
    seen, ended = Canary(), threading.Event()

    def run() -> None:
        while not ended.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            body = {"inputs": "def add(a, b):", "parameters": {"max_new_tokens": 64, "ignore_eos_token": True}}
            try:
                connection.request("POST", "/generate_stream", json.dumps(body), {"content-type": "application/json"})
                answer, text, at = connection.getresponse(), "", 0.0
                while line := answer.readline():
                    if line.startswith(b"data:"):
                        now = time.monotonic()
                        seen.pauses.append(now - at if at else 0.0)
                        at = now
                        text = json.loads(line[5:]).get("generated_text") or text
                seen.texts.add(text)
            except (OSError, ValueError, http.client.HTTPException) as error:
                seen.failures.append(repr(error))
            finally:
                connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def check(port: int, grammars: list[Hostile]) -> Canary:
    """Ask for all of them, by some callers at once, next to a canary."""
    with streaming(port) as seen, ThreadPoolExecutor(NUM_CALLERS) as pool:
        answers = list(pool.map(lambda pair: ask(port, *pair), enumerate(grammars)))
    counts = Counter(status for status, _ in answers)
    longest = max(seen.pauses)
    print(f"{dict(counts)}, {len(seen.pauses)} tokens of the canary, longest pause {longest:.2f} s", file=sys.stderr)
    wrong = [(problem, str(each.fields)[:200]) for (_, problem), each in zip(answers, grammars, strict=True) if problem]
    assert not wrong
    assert not seen.failures and len(seen.texts) == 1 and "" not in seen.texts
    return seen


@pytest.mark.long
def test_hostile_grammars_fail_alone(replicas: Replicas) -> None:
    check(replicas.launched.port, hostile(6, SEED))


def test_every_kind_is_drawn() -> None:
    kinds = Counter(each.kind for each in hostile(400, SEED))
    assert set(kinds) == {"schema", "regex", "grammar", "choice", "none"} and min(kinds.values()) >= 10
    assert hostile(5, SEED) == hostile(5, SEED) != hostile(5, SEED + 1)


@pytest.mark.long
def test_two_thousand_hostile_grammars_fail_alone() -> None:
    with Launched(*EXACT) as launched:
        launched.wait_until_ready()
        pids = [launched.child("router"), launched.shard(0)]
        check(launched.port, hostile(100, SEED + 1))
        before = resident_mb(pids)
        seen = check(launched.port, hostile(2000, SEED))
        after = resident_mb(pids)
        print(f"{after - before:.0f} MB more than after the first 100", file=sys.stderr)
        assert max(seen.pauses) < STALL_S
        assert after - before < MEMORY_MB
