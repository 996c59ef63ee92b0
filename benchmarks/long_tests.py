"""The tests that are left out of `make test` for their length, one case each: clusters, machines, second servers."""

from typing import Any

from benchmarks.case import Cases
from benchmarks.clients import num_failed, outcomes

__all__ = ["NUM_TESTS", "SETTINGS", "measure", "num_failed"]

NUM_TESTS = 0
SETTINGS: dict[str, Any] = {"marked": "long"}


def measure(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per test; one that was skipped has failed."""
    for case in outcomes("tests", "-m", "long"):
        if case.name not in finished:
            yield case
