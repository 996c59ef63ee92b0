"""Open loop: requests arrive by a Poisson process whatever the server does; the highest rate with a 99th percentile of
the time to first token within two seconds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw, percentile
from benchmarks.load import completions, peers, servers
from benchmarks.load.rounds import EXTRA, LENGTH, OURS, VLLM
from benchmarks.models.limit import PROMPT_TOKENS
from benchmarks.models.prompts import prompts

RATES = tuple(step / 4 for step in range(1, 16))
"""Requests per second that are tried, by bisection: four probes find the highest good one."""
REQUESTS = 60
FIRST_TOKEN_S = 2.0
SEED = 11_000


def measure() -> Cases:
    """One case: every probe of each server, which is alone on the machine."""
    model = peers.model_folder()
    raw: dict[str, Any] = {}
    errors: list[str] = []
    for name, command in {OURS: servers.lorikeet(model), VLLM: peers.vllm(model)}.items():
        with servers.running(name, command) as server:
            target = completions.Endpoint(server.port, str(model), EXTRA[name])
            uvloop.run(completions.closed_loop(target, prompts(4, PROMPT_TOKENS, SEED), 2, LENGTH))
            raw[name] = _search(target, errors)
    yield Case("search", raw, "; ".join(errors[:3]))


def _search(target: completions.Endpoint, errors: list[str]) -> list[dict[str, Any]]:
    """The probes of one server."""

    def probe(number: int) -> dict[str, Any]:
        texts = prompts(REQUESTS, PROMPT_TOKENS, SEED + number)
        answers = uvloop.run(completions.poisson(target, texts, RATES[number], LENGTH, SEED + number))
        errors.extend(answer.error for answer in answers if answer.error)
        seconds = [round(answer.first_token_s, 4) for answer in answers if not answer.error]
        return {"rate": RATES[number], "first_token_s": seconds}

    return bisect(len(RATES), probe, holds, errors)


def bisect(
    count: int, probe: Callable[[int], dict[str, Any]], holds: Callable[[Raw], bool], errors: Sequence[str]
) -> list[dict[str, Any]]:
    """The probes of a bisection over `count` ascending rates: the first rate that fails is above the highest that
    holds. An error ends it.
    """
    probes: list[dict[str, Any]] = []
    low, high = 0, count
    while low < high and not errors:
        middle = (low + high) // 2
        probes.append(probe(middle))
        low, high = (middle + 1, high) if holds(probes[-1]) else (low, middle)
    return probes


def holds(probe: Raw) -> bool:
    return percentile(probe["first_token_s"], 99) <= FIRST_TOKEN_S


def highest_rate(server: str, raw: Raw, holds: Callable[[Raw], bool] = holds) -> float:
    """Requests per second of the best probe that held; 0 if none did."""
    return max((float(probe["rate"]) for probe in raw[server] if holds(probe)), default=0.0)


def over_vllm(raw: Raw) -> float:
    """Our highest rate over vLLM's; 0 if vLLM held none."""
    peer = highest_rate(VLLM, raw)
    return highest_rate(OURS, raw) / peer if peer else 0.0
