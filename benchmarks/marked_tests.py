"""The tests that `make test` leaves out, one case each: the long ones (clusters, machines, second servers, rounds of
measurements), and those of kernels for devices in full, in Triton's interpreter, and of `make bench-cuda` on CPU.

    python -m benchmarks.proof --part recovery-tests --part devices-tests
"""

from typing import Any

from benchmarks.case import Cases
from benchmarks.clients import num_failed, outcomes

__all__ = ["NUM_LONG", "NUM_OF_DEVICES", "long", "num_failed", "of_devices", "settings"]

NUM_LONG, NUM_OF_DEVICES = 58, 19


def settings(mark: str) -> dict[str, Any]:
    """How those of one mark are run."""
    return {"options": ("-m", mark, "-n", "2", "--dist", "worksteal")}


def long(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per test; one that was skipped has failed."""
    return _measure("long", finished)


def of_devices(finished: frozenset[str] = frozenset()) -> Cases:
    """The same of those for devices."""
    return _measure("device", finished)


def _measure(mark: str, finished: frozenset[str]) -> Cases:
    for case in outcomes("tests", *settings(mark)["options"], OMP_NUM_THREADS="1"):
        if case.name not in finished:
            yield case
