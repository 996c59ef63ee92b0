"""The figures of recovery, and what they depend on."""

from functools import partial

from benchmarks.evidence.figure import Figure, Over, Suite
from benchmarks.evidence.sources import ADAPTERS, EMBEDDED_MODEL, SERVER
from benchmarks.recovery import pauses
from tests.endurance import faults

SOURCES = (*SERVER, *ADAPTERS, *EMBEDDED_MODEL, "benchmarks/recovery/pauses.py", "tests/endurance/faults.py",
           "benchmarks/load/servers.py", "launcher/cli/client.py")  # fmt: skip


def _pauses(kind: str, what: str, target: float | None) -> Suite:
    num_faults = pauses.FAULTS[kind]
    return Suite(
        f"recovery-{kind}", partial(pauses.measure, kind), num_faults // pauses.PER_CASE,
        (Figure(f"longest pause of a stream, {what.format(num_faults)}", faults.longest_gap, target, at_least=False,
                unit="s", over=Over.WORST),),
        SOURCES, "embedded model", "bfloat16",
    )  # fmt: skip


SUITES: tuple[Suite, ...] = (
    _pauses("kill", "shard killed {} times", 1.0),
    _pauses("stop", "shard stopped {} times", 3.0),
    _pauses("roll", "{} rolling restarts", None),
)
