"""The tests of kernels for devices in full, in Triton's interpreter, of `make bench-cuda` on CPU, and of the end of a
rank, one case each.

    python -m benchmarks.proof --part devices-tests
"""

from typing import Any

from benchmarks.case import Cases
from benchmarks.clients import num_failed, outcomes

__all__ = ["NUM_TESTS", "SETTINGS", "measure", "num_failed"]

NUM_TESTS = 15
OPTIONS = ("-m", "device", "-n", "2", "--dist", "worksteal")
SETTINGS: dict[str, Any] = {"options": OPTIONS}


def measure(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per test; one that was skipped has failed."""
    for case in outcomes("tests", *OPTIONS, OMP_NUM_THREADS="1"):
        if case.name not in finished:
            yield case
