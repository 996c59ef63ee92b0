"""The figures of recovery."""

from functools import partial

from benchmarks.evidence.figure import Figure, Over, Suite
from benchmarks.recovery import pauses
from tests.endurance import faults


def _pauses(kind: str, what: str, target: float | None) -> Suite:
    num_faults = pauses.FAULTS[kind]
    return Suite(
        f"recovery-{kind}", partial(pauses.measure, kind), num_faults // pauses.PER_CASE,
        (Figure(f"longest pause of a stream, {what.format(num_faults)}", faults.longest_gap, target, at_least=False,
                unit="s", over=Over.WORST),),
        "embedded model", "bfloat16",
    )  # fmt: skip


SUITES: tuple[Suite, ...] = (
    _pauses("kill", "shard killed {} times", 1.0),
    _pauses("stop", "shard stopped {} times", 3.0),
    _pauses("roll", "{} rolling restarts", None),
)
