"""The same eight adapters from our server and from vLLM on CPU, one adapter for each of eight clients, in alternating
rounds. The server that is not asked stands still.

    python -m benchmarks.adapters_peer [ROUNDS]
"""

import contextlib
import json
import os
import sys
from typing import Any

import uvloop

from benchmarks import adapted, adapters_cost, peers, servers
from benchmarks.adapters_cost import CLIENTS, RANK
from benchmarks.case import Case, Cases, Raw
from benchmarks.closed_loop import EXTRA, IDLE_CPU, LENGTH, OURS, VLLM, summary

ROUNDS = 8
SEED = 23_000
SIZES = {
    OURS: adapters_cost.Size(ROUNDS, requests_per_client=3),
    VLLM: adapters_cost.Size(ROUNDS, requests_per_client=1),
}
"""vLLM is asked for less: with adapters it takes several times as long for each token, and rounds are to be short."""
FLAGS = ("--enable-lora", "--max-loras", str(CLIENTS), "--max-lora-rank", str(RANK))
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "clients": CLIENTS,
    "rank": RANK,
    "requests_per_client": {name: size.requests_per_client for name, size in SIZES.items()},
    "tokens_in": LENGTH.num_prompt,
    "tokens_out": LENGTH.num_output,
    "seed": SEED,
    "vllm": peers.VLLM_VERSION,
    "vllm_flags": (*peers.VLLM_FLAGS, *FLAGS),
    "vllm_environment": peers.VLLM_ENVIRONMENT,
}


def measure(finished: frozenset[str] = frozenset(), rounds: int = ROUNDS) -> Cases:
    """One case per round: both servers, first one first and then the other."""
    from benchmarks import adapter_files  # torch

    base = adapted.full()
    names = [f"attention-{i}" for i in range(CLIENTS)]
    folders = adapter_files.make(base.model, base.root, names, rank=RANK)
    modules = [f"{name}={folder}" for name, folder in zip(names, folders, strict=True)]
    with contextlib.ExitStack() as stack:
        both = {
            VLLM: stack.enter_context(
                servers.running(VLLM, peers.vllm(base.model, *FLAGS, "--lora-modules", *modules))
            ),
            OURS: stack.enter_context(adapted.serving(OURS, base)),
        }
        for number in range(-1, rounds):
            if f"round {number}" not in finished:
                case = _round(number, names, both)
                if number >= 0:  # the first one warms up
                    yield case


def _round(number: int, names: list[str], both: dict[str, servers.Server]) -> Case:
    raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    errors = []
    for server in (OURS, VLLM) if number % 2 == 0 else (VLLM, OURS):
        idle = both[VLLM if server == OURS else OURS]
        with idle.frozen():
            before = idle.cpu_seconds()
            asked = adapters_cost.ask(both[server].port, names, SEED + 1 + number, SIZES[server], EXTRA[server])
            answers = uvloop.run(asked)
            spent = idle.cpu_seconds() - before
        raw[server] = summary(answers)
        errors += [f"{server}: {answer.error}" for answer in answers if answer.error]
        if spent > servers.TICK_S + IDLE_CPU * (answers[-1].last - answers[0].sent):
            errors.append(f"{idle.name} used {spent:.2f} s of a core while idle")
    return Case(f"round {number}", raw, "; ".join(errors[:3]))


def over_vllm(raw: Raw) -> float:
    return float(raw[OURS]["tokens_per_second"] / raw[VLLM]["tokens_per_second"])


if __name__ == "__main__":
    for case in measure(rounds=int(sys.argv[1]) if sys.argv[1:] else ROUNDS):
        told = "" if case.error else f"{over_vllm(case.raw):.2f} times vLLM"
        print(f"{case.name}: {told}", json.dumps(case.raw), case.error, flush=True)
