"""Closed loop over HTTP against the machine's limit and vLLM, in alternating rounds."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import completions, peers, servers
from benchmarks.load.rounds import EXTRA, LENGTH, OURS, VLLM, alone, in_turn, summary
from benchmarks.models.limit import PROMPT_TOKENS, Machine
from benchmarks.models.limit import tokens_per_second as limit
from benchmarks.models.prompts import prompts

ROUNDS = 8
REQUESTS_PER_CLIENT = {1: 6, 8: 3, 32: 2}
"""Fixed by a pilot: rounds of about ten seconds, twice that at 32 clients."""
VOID_BELOW = {1: 0.57, 8: 0.60, 32: 0.60}
"""vLLM's share of the limit below which the machine was too disturbed for a conclusion."""
SEED = 7_000
Asked = Callable[[str], Sequence[completions.TimedCompletion]]
"""Asks a server by its name."""
VLLM_VERSION, VLLM_FLAGS, VLLM_ENVIRONMENT = peers.VLLM_VERSION, peers.VLLM_FLAGS, peers.VLLM_ENVIRONMENT


def measure(clients: int, rounds: int = ROUNDS) -> Cases:
    """One case per round: the limit, then both servers in turn."""
    with next_to_vllm() as (both, targets):
        ask = partial(run, targets, clients, REQUESTS_PER_CLIENT[clients])
        for name in both:
            ask(SEED, name)
        for number in range(rounds):
            machine = {"clients": clients, **speeds()}
            case = in_round(number, both, partial(ask, SEED + 1 + number))
            yield replace(case, raw={**machine, **case.raw})


@contextlib.contextmanager
def next_to_vllm() -> Iterator[tuple[Mapping[str, servers.RunningServer], Mapping[str, completions.Endpoint]]]:
    """vLLM and this server, and where requests to each go, by name."""
    model = peers.model_folder()
    commands = {VLLM: peers.vllm(model), OURS: servers.lorikeet(model)}
    with contextlib.ExitStack() as stack:
        both = {name: stack.enter_context(servers.running(name, command)) for name, command in commands.items()}
        yield both, {name: completions.Endpoint(server.port, str(model), EXTRA[name]) for name, server in both.items()}


def in_round(number: int, running: Mapping[str, servers.RunningServer], ask: Asked) -> Case:
    """Ask each server in turn, while the others are stopped."""
    raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    errors: list[str] = []
    for name in in_turn(tuple(running), number):
        with alone(name, running, errors):
            answers = ask(name)
        raw[name] = summary(answers)
        errors += [f"{name}: {answer.error}" for answer in answers if answer.error]
    return Case(f"round {number}", raw, "; ".join(errors[:3]))


def run(
    targets: Mapping[str, completions.Endpoint], clients: int, requests: int, seed: int, name: str
) -> list[completions.TimedCompletion]:
    """A closed loop of so many requests per client."""
    texts = prompts(clients * requests, PROMPT_TOKENS, seed)
    return uvloop.run(completions.closed_loop(targets[name], texts, clients, LENGTH))


def speeds() -> dict[str, float]:
    """The machine's two speeds at this moment, measured by a process that is gone when the servers run."""
    command = [sys.executable, "-m", "benchmarks.serving.machine"]
    output = subprocess.run(command, cwd=servers.REPOSITORY, check=True, capture_output=True, text=True).stdout
    measured: dict[str, float] = json.loads(output.splitlines()[-1])
    return measured


def share_of_limit(raw: Raw, server: str = OURS) -> float:
    """Tokens per second over the limit of the same round."""
    machine = Machine(raw["flops"], raw["bytes_per_s"])
    return float(raw[server]["tokens_per_second"] / limit(machine, raw["clients"]))


def void(raws: Sequence[Raw]) -> str:
    """A run in which vLLM was far below what it can do is no evidence."""
    clients = raws[0]["clients"]
    share = statistics.median(share_of_limit(raw, VLLM) for raw in raws)
    if share >= VOID_BELOW[clients]:
        return ""
    return f"vLLM reached {share:.2f} of the limit at {clients} clients, below {VOID_BELOW[clients]}"
