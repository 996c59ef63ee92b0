"""What prompt lookup is worth over HTTP: the embedded model with its copy-heavy adapter, with it and without, and the
same adapter from vLLM with its n-gram speculation. Alternating rounds of fresh prompts; who is not asked stands still.

    python -m benchmarks.lookup_speed [--quick] [--peer]
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks import adapted, guessing, peers, servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.closed_loop import IDLE_CPU, OURS, VLLM

ROUNDS = 8
CLIENTS = 1
PROMPTS = 24
"""In each round and way."""
WIDTH = 10
MOST_TOKENS = 96
ADAPTER = "adapters/citation"
RANK = 32
ON, OFF = "on", "off"
WAYS: Mapping[str, Mapping[str, Any]] = {
    ON: {"speculative_method": "lookup", "speculative_tokens": WIDTH},
    OFF: {"speculative_method": "off"},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": WIDTH, "prompt_lookup_max": 8, "prompt_lookup_min": 1}
PEER_FLAGS = (
    "--enable-lora", "--max-loras", "1", "--max-lora-rank", str(RANK), "--speculative-config", json.dumps(NGRAM),
    "--lora-modules", f"{ADAPTER}={guessing.FAMILY / ADAPTER}",
)  # fmt: skip
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "clients": CLIENTS,
    "prompts": PROMPTS,
    "width": WIDTH,
    "most_tokens": MOST_TOKENS,
    "adapter": ADAPTER,
    "vllm": peers.VLLM_VERSION,
    "vllm_flags": (*peers.VLLM_FLAGS, *PEER_FLAGS),
}


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    rounds: int = ROUNDS
    prompts: int = PROMPTS


QUICK = Size(1, 3)


def command() -> servers.Command:
    """Our server in the model's own bfloat16, without a draft model."""
    own = ("--default-adapter-source", "local", "--local-adapter-root", str(guessing.FAMILY))
    return servers.lorikeet(guessing.BASE, *own, "--adapter-store", str(guessing.STORE), "--cpu-memory", "512MiB")


def measure(finished: frozenset[str] = frozenset(), size: Size | None = None) -> Cases:
    """One case per round: with and without, in an order that turns from round to round."""
    size = size or Size()
    with servers.running("lookup", command()) as server:
        for number in range(-1, size.rounds):
            if f"round {number}" not in finished:
                raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
                for place, way in enumerate((ON, OFF) if number % 2 else (OFF, ON)):
                    raw[way] = uvloop.run(ask(server.port, _prompts(size, number, place), WAYS[way]))
                if number >= 0:  # the first one warms up
                    yield Case(f"round {number}", raw)


def against_peer(finished: frozenset[str] = frozenset(), size: Size | None = None) -> Cases:
    """One case per round: our server with lookup and vLLM's with n-grams, on the same prompts."""
    size = size or Size()
    with contextlib.ExitStack() as stack:
        both = {
            VLLM: stack.enter_context(servers.running(VLLM, peers.vllm(guessing.BASE, *PEER_FLAGS))),
            OURS: stack.enter_context(servers.running(OURS, command())),
        }
        for number in range(-1, size.rounds):
            if f"round {number}" not in finished:
                case = _round(number, size, both)
                if number >= 0:
                    yield case


def _round(number: int, size: Size, both: Mapping[str, servers.Server]) -> Case:
    raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    errors = []
    for name in (OURS, VLLM) if number % 2 else (VLLM, OURS):
        idle = both[VLLM if name == OURS else OURS]
        with idle.frozen():
            before = idle.cpu_seconds()
            extra = WAYS[ON] if name == OURS else {}
            raw[name] = uvloop.run(ask(both[name].port, _prompts(size, number, 0), extra))
            spent = idle.cpu_seconds() - before
        if spent > servers.TICK_S + IDLE_CPU * raw[name]["seconds"]:
            errors.append(f"{idle.name} used {spent:.2f} s of a core while idle")
    return Case(f"round {number}", raw, "; ".join(errors))


def _prompts(size: Size, number: int, place: int) -> list[str]:
    """Prompts that no other round and way has: none is found in a cache of prefixes."""
    count = size.prompts
    first = (2 * (number + 1) + place) * count
    return guessing.prompts("citation", 2 * count * (size.rounds + 1))[first : first + count]


async def ask(port: int, prompts: Sequence[str], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy texts up to their ends, by OpenAI's completions; tokens and seconds."""
    waiting = itertools.count()
    num_tokens = []

    async def client() -> None:
        for index in waiting:
            if index >= len(prompts):
                return
            body = {"model": ADAPTER, "prompt": prompts[index], "max_tokens": MOST_TOKENS, "temperature": 0, **extra}
            reply = await adapted.send(port, "/v1/completions", body)
            if reply.status != 200:
                raise RuntimeError(f"{reply.status} {reply.body[:300]!r}")
            num_tokens.append(reply.json["usage"]["completion_tokens"])

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    seconds = time.monotonic() - start
    tokens = sum(num_tokens)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def times(of: str, over: str, raw: Raw) -> float:
    """Tokens per second of one over those of another, in the same round."""
    return float(raw[of]["tokens_per_second"] / raw[over]["tokens_per_second"])


if __name__ == "__main__":
    chosen = QUICK if "--quick" in sys.argv else Size()
    part, pair = (against_peer, (OURS, VLLM)) if "--peer" in sys.argv else (measure, (ON, OFF))
    print(f"| round | {pair[0]} tokens/s | {pair[1]} tokens/s | times |\n|---|---|---|---|")
    told = []
    for case in part(size=chosen):
        first, second = (case.raw[name]["tokens_per_second"] for name in pair)
        print(f"| {case.name} | {first:.1f} | {second:.1f} | {first / second:.2f} | {case.error}", flush=True)
        told.append({**case.raw, "error": case.error})
    print(json.dumps(told))
