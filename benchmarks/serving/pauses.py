"""How long streams pause when a shard is killed, stopped, or replaced by a rolling restart, under a mixed load.

The run is that of the long tests (`tests/endurance/faults.py`): an answer that a fault changed fails the case.
"""

import signal

from benchmarks.evidence.figure import Case, Cases
from tests.endurance import faults

FAULTS = {"kill": faults.KILLS, "stop": faults.STOPS, "roll": faults.ROLLS}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "roll": signal.SIGUSR2}
PER_CASE, CLIENTS, SEED = faults.FAULTS_PER_CASE, faults.CLIENTS, faults.SEED


def measure(kind: str, num_faults: int | None = None) -> Cases:
    """One case, with its own server, per ten faults."""
    remaining = FAULTS[kind] if num_faults is None else num_faults
    for number in range(-(-remaining // PER_CASE)):
        case = faults.run_with_faults(SIGNALS[kind], min(PER_CASE, remaining - number * PER_CASE), number)
        wrong = "; ".join(case.raw["wrong"][:3])
        yield Case(case.name, {"answers": case.raw["answers"], "faults": case.raw["faults"]}, case.error or wrong)
