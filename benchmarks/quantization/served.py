"""Servers with rounded weights against one with plain ones: one client over HTTP on the 200 M Llama, 256 tokens in and
64 out, in alternating rounds.

    python -m benchmarks.quantization.served [--rounds N]
"""

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases
from benchmarks.load import completions, servers
from benchmarks.load.rounds import EXTRA, LENGTH, OURS, alone, in_turn, speedup, summary
from benchmarks.models.prompts import prompts
from benchmarks.models.random_llama import llama_200m
from benchmarks.quantization.weights import METHODS, PLAIN

ROUNDS = 8
REQUESTS = 4
"""Of a round."""
SEED = 31_000


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round, after one that warms up."""
    model = llama_200m()
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(_serving(name, model)) for name in (PLAIN, *METHODS)}
        for number in range(-1, rounds):
            raw: dict[str, Any] = {}
            errors: list[str] = []
            for name in in_turn(tuple(running), number):
                with alone(name, running, errors):
                    answers = _run(running[name], model, SEED + number)
                raw[name] = summary(answers)
                errors += [f"{name}: {answer.error}" for answer in answers if answer.error]
            if number >= 0:
                yield Case(f"round {number + 1}", raw, "; ".join(errors[:3]))


def _serving(name: str, model: Path) -> contextlib.AbstractContextManager[servers.Server]:
    flags = () if name == PLAIN else ("--quantize", name)
    return servers.running(f"{OURS}-{name}", servers.lorikeet(model, "--dtype", "bfloat16", *flags))


def _run(server: servers.Server, model: Path, seed: int) -> list[completions.Answer]:
    target = completions.Target(server.port, str(model), EXTRA[OURS])
    texts = prompts(REQUESTS, LENGTH.num_prompt, seed)
    return uvloop.run(completions.closed_loop(target, texts, 1, LENGTH))


def main() -> int:
    options = arguments.parser(__doc__, rounds=ROUNDS).parse_args()
    return arguments.print_cases(
        measure(options.rounds), {method: partial(speedup, method, PLAIN) for method in METHODS}
    )


if __name__ == "__main__":
    sys.exit(main())
