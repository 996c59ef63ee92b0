"""Closed loop over HTTP next to a process that takes half a core in a fixed pattern, this server and vLLM in
alternating rounds.

python -m benchmarks.serving.neighbour [--clients 1|8|32] [--rounds N]
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Cases, in_rounds
from benchmarks.load import rounds as turns
from benchmarks.load import servers
from benchmarks.load.rounds import OURS, VLLM, speedup
from benchmarks.serving import closed_loop

ROUNDS = 8
SEED = 61_000
EXTRA = turns.EXTRA
PERIOD_S, SHARE = 0.02, 0.5
"""The process computes for so much of each period, and sleeps for the rest."""
PROGRAM = f"""
import time
while True:
    began = time.monotonic()
    while time.monotonic() < began + {PERIOD_S * SHARE}:
        pass
    time.sleep({PERIOD_S * (1 - SHARE)})
"""


def measure(clients: int, rounds: int = ROUNDS) -> Cases:
    """One case per round, after one that warms up: both servers in turn, next to the neighbour."""
    with closed_loop.next_to_vllm() as (both, targets), neighbour():
        ask = partial(closed_loop.run, targets, clients, closed_loop.REQUESTS_PER_CLIENT[clients])
        yield from in_rounds(rounds, lambda number: closed_loop.in_round(number, both, partial(ask, SEED + number)))


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """A process that takes half a core meanwhile."""
    tied = [sys.executable, str(servers.TETHER), str(os.getpid())]
    process = subprocess.Popen([*tied, sys.executable, "-c", PROGRAM])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    parser = arguments.parser(__doc__, rounds=ROUNDS)
    parser.add_argument("--clients", type=int, choices=list(closed_loop.REQUESTS_PER_CLIENT), default=8)
    chosen = parser.parse_args()
    cases = measure(chosen.clients, chosen.rounds)
    sys.exit(arguments.print_cases(cases, {"vLLM": partial(speedup, OURS, VLLM)}))
