"""The speed-up of prompt lookup over HTTP: the embedded model with its copy-heavy adapter, with lookup and without;
and against the same adapter from vLLM with its n-gram speculation. Alternating rounds of fresh prompts; the server
that is not asked is stopped.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw, in_rounds
from benchmarks.load import adapted, peers, servers
from benchmarks.load.rounds import OURS, VLLM, alone, in_turn
from tests.oracles import family

ROUNDS = 8
CLIENTS = 1
PROMPTS = 24
"""In each round and way."""
WIDTH = 10
MAX_TOKENS = 96
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
)  # fmt: skip


@dataclass(frozen=True)
class LookupSize:
    """How many rounds, and prompts in each."""

    rounds: int = ROUNDS
    prompts: int = PROMPTS


QUICK = LookupSize(1, 3)


def command() -> servers.Command:
    """Our server without a draft model, in the model's own bfloat16."""
    adapter_flags = ("--default-adapter-source", "local", "--local-adapter-root", str(family.FAMILY))
    return servers.lorikeet(family.BASE, *adapter_flags, "--adapter-store", str(family.STORE), "--cpu-memory", "512MiB")


def measure(size: LookupSize | None = None) -> Cases:
    """One case per round: with lookup and without, each first in turn, after a round that warms up."""
    size = size or LookupSize()
    with servers.running("lookup", command()) as server:

        def measured(number: int) -> Raw:
            places = enumerate(in_turn((OFF, ON), number))
            results = {
                way: uvloop.run(ask(server.port, _prompts(size, number, place), WAYS[way])) for place, way in places
            }
            return {"load_average": os.getloadavg()[0], **results}

        yield from in_rounds(size.rounds, measured)


def against_peer(size: LookupSize | None = None) -> Cases:
    """One case per round: our server with lookup and vLLM's with n-grams, on the same prompts."""
    size = size or LookupSize()
    modules = ("--lora-modules", f"{ADAPTER}={family.FAMILY / ADAPTER}")
    with contextlib.ExitStack() as stack:
        both = {
            VLLM: stack.enter_context(servers.running(VLLM, peers.vllm(family.BASE, *PEER_FLAGS, *modules))),
            OURS: stack.enter_context(servers.running(OURS, command())),
        }
        for number in range(-1, size.rounds):
            raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
            errors: list[str] = []
            for name in in_turn((VLLM, OURS), number):
                with alone(name, both, errors):
                    extra = WAYS[ON] if name == OURS else {}
                    raw[name] = uvloop.run(ask(both[name].port, _prompts(size, number, 0), extra))
            if number >= 0:
                yield Case(f"round {number}", raw, "; ".join(errors))


def _prompts(size: LookupSize, number: int, place: int) -> list[str]:
    """Prompts of only this round and way, so that none is found in the prefix cache."""
    count = size.prompts
    first = (2 * (number + 1) + place) * count
    return family.prompts("citation", 2 * count * (size.rounds + 1))[first : first + count]


async def ask(port: int, prompts: Sequence[str], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy texts up to their ends, by OpenAI's completions; tokens and seconds."""
    waiting = iter(prompts)
    num_tokens = []

    async def client() -> None:
        for prompt in waiting:
            body = {"model": ADAPTER, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, **extra}
            reply = await adapted.send(port, "/v1/completions", body)
            if reply.status != 200:
                raise RuntimeError(f"{reply.status} {reply.body[:300]!r}")
            num_tokens.append(reply.json["usage"]["completion_tokens"])

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    seconds = time.monotonic() - start
    tokens = sum(num_tokens)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
