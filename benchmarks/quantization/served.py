"""Servers with rounded weights against one with plain ones: one client over HTTP on the 200 M Llama, 256 tokens in and
64 out, in alternating rounds.

    python -m benchmarks.quantization.served [--rounds N]
"""

import contextlib
import sys
from functools import partial
from pathlib import Path

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Cases, in_rounds
from benchmarks.load import completions, servers
from benchmarks.load.rounds import EXTRA, OURS, speedup
from benchmarks.models.random_llama import llama_200m
from benchmarks.quantization.weights import METHODS, PLAIN
from benchmarks.serving.closed_loop import in_round, run

ROUNDS = 8
REQUESTS = 4
"""Requests of a round."""
SEED = 31_000


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round, after one that warms up."""
    model = llama_200m()
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(_serving(name, model)) for name in (PLAIN, *METHODS)}
        targets = {name: completions.Target(each.port, str(model), EXTRA[OURS]) for name, each in running.items()}
        ask = partial(run, targets, 1, REQUESTS)
        yield from in_rounds(rounds, lambda number: in_round(number, running, partial(ask, SEED + number)))


def _serving(name: str, model: Path) -> contextlib.AbstractContextManager[servers.Server]:
    flags = () if name == PLAIN else ("--quantize", name)
    return servers.running(f"{OURS}-{name}", servers.lorikeet(model, "--dtype", "bfloat16", *flags))


if __name__ == "__main__":
    cases = measure(arguments.parser(__doc__, rounds=ROUNDS).parse_args().rounds)
    sys.exit(arguments.print_cases(cases, {method: partial(speedup, method, PLAIN) for method in METHODS}))
