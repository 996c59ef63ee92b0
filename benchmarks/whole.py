"""Proofs that take other programs whole: the router alone, a fresh clone, transformers' batching.

Knows how each is run and what it prints. Nothing is measured here that its own program does not measure.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import uvloop

from benchmarks import load, peers, servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.closed_loop import EXTRA, LENGTH, OURS
from benchmarks.limit import OUTPUT_TOKENS, PROMPT_TOKENS
from benchmarks.prompts import prompts

ROUNDS = 8
PEER_REQUESTS = 8
SEED = 13_000
PEER_SETTINGS: dict[str, Any] = {"rounds": ROUNDS, "requests": PEER_REQUESTS, "seed": SEED, "attention": "sdpa"}
ROUTER_SETTINGS: dict[str, Any] = {"rounds": ROUNDS}
CLONE_TIMEOUT_S = 1_800


def router(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per round: tokens per second of 256 streams and what 64 clients wait longer for the first token."""
    output = printed([sys.executable, "-m", "benchmarks.router", "--rounds", str(ROUNDS)])
    told = json.loads(output[-1])
    rounds = zip(told["tokens_per_second_rounds"], told["first_token_pairs_s"], strict=True)
    for number, (rate, (routed, straight)) in enumerate(rounds):
        raw = {"tokens_per_second": rate, "first_token_s": routed, "first_token_without_router_s": straight}
        if f"round {number}" not in finished:
            yield Case(f"round {number}", raw)


def added_first_token_ms(raw: Raw) -> float:
    return float(1000 * (raw["first_token_s"] - raw["first_token_without_router_s"]))


def clone(finished: frozenset[str] = frozenset()) -> Cases:
    """`make test` in a fresh clone of HEAD: nothing installed, nothing cached but pip's own downloads."""
    if "make test" in finished:
        return
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(servers.REPOSITORY), str(target)], check=True)
        start = time.monotonic()
        done = subprocess.run(
            ["make", "test"],
            cwd=target,
            env={**os.environ, "CI": "true"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLONE_TIMEOUT_S,
            check=False,
        )
        seconds = round(time.monotonic() - start, 1)
        summary = (done.stdout.strip().splitlines() or [""])[-1]
        error = "" if done.returncode == 0 else f"make test ended with {done.returncode}: {done.stdout[-1500:]}"
        yield Case("make test", {"seconds": seconds, "summary": summary}, error)


def transformers(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per round: our server and transformers' continuous batching on the same prompts, one after the other."""
    model = peers.model_folder()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(servers.running(OURS, servers.lorikeet(model)))
        peer = stack.enter_context(_batching(model))
        target = load.Target(server.port, str(model), EXTRA[OURS])
        _ask(peer, prompts(2, PROMPT_TOKENS, SEED))
        uvloop.run(load.closed_loop(target, prompts(2, PROMPT_TOKENS, SEED), 2, LENGTH))
        for number in range(ROUNDS):
            if f"round {number}" in finished:
                continue
            texts = prompts(PEER_REQUESTS, PROMPT_TOKENS, SEED + 1 + number)
            answers = uvloop.run(load.closed_loop(target, texts, PEER_REQUESTS, LENGTH))
            theirs = _ask(peer, texts)
            errors = [answer.error for answer in answers if answer.error]
            if theirs["counts"] != [OUTPUT_TOKENS] * PEER_REQUESTS:
                errors.append(f"transformers gave {theirs['counts']} tokens")
            raw = {
                OURS: 0.0 if errors else round(load.tokens_per_second(answers), 3),
                "transformers": round(sum(theirs["counts"]) / theirs["seconds"], 3),
                "first_token_s": 0.0 if errors else round(statistics.median(a.first_token_s for a in answers), 4),
            }
            yield Case(f"round {number}", raw, "; ".join(errors[:3]))


def over_transformers(raw: Raw) -> float:
    return float(raw[OURS] / raw["transformers"])


@contextlib.contextmanager
def _batching(model: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "benchmarks.transformers_batching", str(model), str(OUTPUT_TOKENS)]
    process = subprocess.Popen(
        command, cwd=servers.REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=None
    )
    try:
        _pipe(process.stdout).readline()
        yield process
    finally:
        process.kill()
        process.wait()


def _ask(process: "subprocess.Popen[str]", texts: list[str]) -> dict[str, Any]:
    stdin = _pipe(process.stdin)
    stdin.write(json.dumps(texts) + "\n")
    stdin.flush()
    answer: dict[str, Any] = json.loads(_pipe(process.stdout).readline())
    return answer


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("process without pipes")
    return stream


def printed(command: list[str]) -> list[str]:
    """The lines that a program of this repository prints. Raises RuntimeError where it fails."""
    done = subprocess.run(command, cwd=servers.REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout.strip().splitlines()
