"""The state machines of the tests at length: random steps of each, until so many were really executed.

python -m benchmarks.machines [STEPS] [NAME…]
"""

import sys
from dataclasses import dataclass
from typing import Any

import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from benchmarks.case import Case, Cases, Raw

STEPS = 10_000
AT_ONCE, LENGTH = 100, 50
"""Lives between two looks at the number of steps, and steps of a life at most."""
SEED = 61_000
NAMES = ("queue", "credit", "scheduler", "slots", "resumption", "router's words", "shards' words")
NUM_MACHINES = len(NAMES)
SETTINGS: dict[str, Any] = {"steps": STEPS, "lives_at_once": AT_ONCE, "steps_of_a_life": LENGTH, "seed": SEED}
LIVES = settings(
    max_examples=AT_ONCE,
    stateful_step_count=LENGTH,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Count:
    """Of one machine: its invariants are looked at once before the first rule of a life, and after each."""

    lives: int = 0
    looks: int = 0

    @property
    def steps(self) -> int:
        return self.looks - self.lives


def machine(name: str) -> type[RuleBasedStateMachine]:
    """As the tests have it."""
    from tests.router.dispatch.test_fair_queue import QueueMachine
    from tests.router.dispatch.test_resumption import ResumptionMachine
    from tests.router.shards.test_codec_fuzz import ShardMessagesMachine
    from tests.router.shards.test_credit import CreditMachine
    from tests.shard.grpc.test_codec_fuzz import WireMachine
    from tests.shard.scheduler.test_adapter_slots import SlotsMachine
    from tests.shard.scheduler.test_scheduler import SchedulerMachine

    machines: tuple[type[RuleBasedStateMachine], ...] = (
        QueueMachine,
        CreditMachine,
        SchedulerMachine,
        SlotsMachine,
        ResumptionMachine,
        WireMachine,
        ShardMessagesMachine,
    )
    return dict(zip(NAMES, machines, strict=True))[name]


def counted(base: type[RuleBasedStateMachine], count: Count) -> type[RuleBasedStateMachine]:
    """The same machine, whose steps are counted."""

    class Counted(base):  # type: ignore[misc, valid-type]  # a base that is not known before
        def __init__(self) -> None:
            super().__init__()
            count.lives += 1

        @invariant()
        def a_step_was_executed(self) -> None:
            count.looks += 1

    return Counted


def measure(finished: frozenset[str] = frozenset(), steps: int = STEPS, names: tuple[str, ...] = NAMES) -> Cases:
    """One case per machine."""
    for name in names:
        if name not in finished:
            yield Case(name, lived(name, steps))


def lived(name: str, steps: int) -> dict[str, Any]:
    """Lives of one machine until so many steps were executed, or one failed."""
    count, failures = Count(), list[str]()
    chosen = counted(machine(name), count)
    with structlog.testing.capture_logs():
        while count.steps < steps and not failures:
            try:
                run_state_machine_as_test(seed(SEED + count.lives)(chosen), settings=LIVES)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}"[:1000])
    return {"steps": count.steps, "lives": count.lives, "failures": failures}


def num_failures(raw: Raw) -> float:
    return float(len(raw["failures"]))


if __name__ == "__main__":
    asked = tuple(word for word in sys.argv[1:] if not word.isdigit()) or NAMES
    most = next((int(word) for word in sys.argv[1:] if word.isdigit()), STEPS)
    for case in measure(steps=most, names=asked):
        print(case.name, case.raw, flush=True)
