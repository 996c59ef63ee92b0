"""Servers with rounded weights against one with plain ones: one client over HTTP on the 200 M Llama, 256 tokens in and
64 out, in alternating rounds.

    python -m benchmarks.quantization.served [--rounds N]
"""

import contextlib
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Cases
from benchmarks.load import completions, servers
from benchmarks.load.rounds import EXTRA, LENGTH, OURS, speedup
from benchmarks.models.prompts import prompts
from benchmarks.models.random_llama import llama_200m
from benchmarks.quantization.weights import METHODS, PLAIN
from benchmarks.serving.closed_loop import in_round

ROUNDS = 8
REQUESTS = 4
"""Requests of a round."""
SEED = 31_000


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round, after one that warms up."""
    model = llama_200m()
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(_serving(name, model)) for name in (PLAIN, *METHODS)}
        for number in range(-1, rounds):
            case = in_round(number, running, partial(_run, running, model, SEED + number))
            if number >= 0:
                yield case


def _serving(name: str, model: Path) -> contextlib.AbstractContextManager[servers.Server]:
    flags = () if name == PLAIN else ("--quantize", name)
    return servers.running(f"{OURS}-{name}", servers.lorikeet(model, "--dtype", "bfloat16", *flags))


def _run(running: Mapping[str, servers.Server], model: Path, seed: int, name: str) -> list[completions.Answer]:
    target = completions.Target(running[name].port, str(model), EXTRA[OURS])
    texts = prompts(REQUESTS, LENGTH.num_prompt, seed)
    return uvloop.run(completions.closed_loop(target, texts, 1, LENGTH))


def main() -> int:
    options = arguments.parser(__doc__, rounds=ROUNDS).parse_args()
    return arguments.print_cases(
        measure(options.rounds), {method: partial(speedup, method, PLAIN) for method in METHODS}
    )


if __name__ == "__main__":
    sys.exit(main())
