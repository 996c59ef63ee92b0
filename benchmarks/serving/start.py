"""Second start of the embedded model: seconds from the command to the first successful readiness answer.

python -m benchmarks.serving.start
"""

import sys
from functools import partial

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, raw_value
from benchmarks.load import servers

ROUNDS = 8


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per start, after one that warms the file cache."""
    _start()
    for number in range(rounds):
        yield Case(f"start {number}", {"ready_s": round(_start(), 3)})


def _start() -> float:
    """No model is named, so the embedded one is served."""
    with servers.running("start", servers.lorikeet(None)) as server:
        return server.ready_s


if __name__ == "__main__":
    chosen = arguments.parser(__doc__, rounds=ROUNDS).parse_args()
    sys.exit(arguments.print_cases(measure(chosen.rounds), {"seconds": partial(raw_value, "ready_s")}))
