"""Second start of the embedded model: seconds from the command to the first successful readiness answer."""

from benchmarks.evidence.figure import Case, Cases
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
