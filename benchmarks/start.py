"""Second start of the embedded model: seconds from the command to the first successful readiness answer.

python -m benchmarks.start
"""

from typing import Any

from benchmarks import servers
from benchmarks.case import Case, Cases

ROUNDS = 8
SETTINGS: dict[str, Any] = {"rounds": ROUNDS, "first_start": "not counted"}


def measure(finished: frozenset[str] = frozenset()) -> Cases:
    """The first start warms the file cache and is not counted."""
    _start()
    for number in range(ROUNDS):
        if f"start {number}" not in finished:
            yield Case(f"start {number}", {"ready_s": round(_start(), 3)})


def _start() -> float:
    """No model is named, so the embedded one is served."""
    with servers.running("start", servers.lorikeet(None)) as server:
        return server.ready_s


if __name__ == "__main__":
    for case in measure():
        print(case.name, case.raw["ready_s"], flush=True)
