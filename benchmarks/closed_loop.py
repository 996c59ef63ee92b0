"""Closed loop over HTTP against the machine's limit and vLLM, in alternating rounds. Knows rounds, no bar.

python -m benchmarks.closed_loop CLIENTS [ROUNDS]
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from benchmarks import load, peers, servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.limit import OUTPUT_TOKENS, PROMPT_TOKENS, Machine
from benchmarks.limit import tokens_per_second as limit
from benchmarks.prompts import prompts

ROUNDS = 8
REQUESTS_PER_CLIENT = {1: 6, 8: 3, 32: 2}
"""Fixed by a pilot: rounds of about ten seconds, twice that at 32 clients."""
VOID_BELOW = {1: 0.57, 8: 0.60, 32: 0.60}
"""vLLM's share of the limit below which the machine was too disturbed to say anything."""
IDLE_CPU = 0.01
"""ScheduledRequest of a core that the frozen server may have used; the other one would have paid for it."""
SEED = 7_000
LENGTH = load.Length(PROMPT_TOKENS, OUTPUT_TOKENS)
OURS, VLLM = "lorikeet", "vllm"
EXTRA = {OURS: {"ignore_eos_token": True}, VLLM: {"ignore_eos": True}}
"""How each server is told to go on past the end token."""

SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "requests_per_client": REQUESTS_PER_CLIENT,
    "tokens_in": PROMPT_TOKENS,
    "tokens_out": OUTPUT_TOKENS,
    "seed": SEED,
    "vllm": peers.VLLM_VERSION,
    "vllm_flags": peers.VLLM_FLAGS,
    "vllm_environment": peers.VLLM_ENVIRONMENT,
    "lorikeet_flags": (),
}


def measure(clients: int, finished: frozenset[str] = frozenset()) -> Cases:
    """One case per round: the limit, then both servers, first one first and then the other."""
    model = peers.model_folder()
    with contextlib.ExitStack() as stack:
        both = {
            VLLM: stack.enter_context(servers.running(VLLM, peers.vllm(model))),
            OURS: stack.enter_context(servers.running(OURS, servers.lorikeet(model))),
        }
        targets = {name: load.Target(server.port, str(model), EXTRA[name]) for name, server in both.items()}
        for name in both:
            _run(targets[name], clients, SEED)
        for round_number in range(ROUNDS):
            name = f"round {round_number}"
            if name not in finished:
                yield _round(name, clients, round_number, both, targets)


def _round(
    name: str,
    clients: int,
    number: int,
    both: dict[str, servers.Server],
    targets: dict[str, load.Target],
) -> Case:
    raw: dict[str, Any] = {"clients": clients, "load_average": os.getloadavg()[0], **speeds()}
    errors = []
    for server in (OURS, VLLM) if number % 2 == 0 else (VLLM, OURS):
        idle = both[VLLM if server == OURS else OURS]
        with idle.frozen():
            began, idle_began = time.monotonic(), idle.cpu_seconds()
            answers = _run(targets[server], clients, SEED + 1 + number)
            idle_share = (idle.cpu_seconds() - idle_began) / (time.monotonic() - began)
        raw[server] = {**summary(answers), "other_idle_cpu": round(idle_share, 4)}
        errors += [f"{server}: {answer.error}" for answer in answers if answer.error]
        if idle_share > IDLE_CPU:
            errors.append(f"{idle.name} used {idle_share:.2f} of a core while idle")
    return Case(name, raw, "; ".join(errors[:3]))


def _run(target: load.Target, clients: int, seed: int) -> list[load.Answer]:
    texts = prompts(clients * REQUESTS_PER_CLIENT[clients], PROMPT_TOKENS, seed)
    return uvloop.run(load.closed_loop(target, texts, clients, LENGTH))


def speeds() -> dict[str, float]:
    """The machine's two speeds at this moment, measured by a process that is gone when the servers run."""
    command = [sys.executable, "-m", "benchmarks.machine"]
    output = subprocess.run(command, cwd=servers.REPOSITORY, check=True, capture_output=True, text=True).stdout
    measured: dict[str, float] = json.loads(output.splitlines()[-1])
    return measured


def summary(answers: Sequence[load.Answer]) -> dict[str, Any]:
    """What a round keeps of its requests."""
    good = [answer for answer in answers if not answer.error]
    if not good:
        return {"requests": len(answers), "tokens_per_second": 0.0}
    return {
        "requests": len(answers),
        "tokens_per_second": round(load.tokens_per_second(good), 3),
        "first_token_s": round(statistics.median(answer.first_token_s for answer in good), 4),
        "inter_token_s": round(statistics.median(answer.inter_token_s for answer in good), 5),
    }


def share_of_limit(raw: Raw, server: str = OURS) -> float:
    """Tokens per second over the limit of the same round."""
    machine = Machine(raw["flops"], raw["bytes_per_s"])
    return float(raw[server]["tokens_per_second"] / limit(machine, raw["clients"]))


def over_vllm(raw: Raw) -> float:
    return float(raw[OURS]["tokens_per_second"] / raw[VLLM]["tokens_per_second"])


def void(raws: Sequence[Raw]) -> str:
    """A run in which vLLM was far below what it can do is no evidence."""
    clients = raws[0]["clients"]
    share = statistics.median(share_of_limit(raw, VLLM) for raw in raws)
    if share >= VOID_BELOW[clients]:
        return ""
    return f"vLLM reached {share:.2f} of the limit at {clients} clients, below {VOID_BELOW[clients]}"


if __name__ == "__main__":
    for case in measure(int(sys.argv[1])):
        ours, theirs = share_of_limit(case.raw), share_of_limit(case.raw, VLLM)
        print(f"{case.name}: {ours:.3f} of the limit, vLLM {theirs:.3f}", json.dumps(case.raw), case.error, flush=True)
