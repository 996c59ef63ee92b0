"""The state machines of the unit tests at length: random steps of each, until a given number was executed."""

from dataclasses import dataclass
from typing import Any

import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

STEPS = 10_000
AT_ONCE, LENGTH = 100, 50
"""Examples between two checks of the number of steps, and steps of an example at most."""
SEED = 61_000
NAMES = (
    "queue",
    "credit",
    "scheduler",
    "slots",
    "resumption",
    "shards' messages (router)",
    "routers' messages (shard)",
)
NUM_MACHINES = len(NAMES)
EXAMPLES = settings(
    max_examples=AT_ONCE,
    stateful_step_count=LENGTH,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Count:
    """Counts of one machine: its invariants are checked once before the first rule of an example, and after each."""

    examples: int = 0
    checks: int = 0

    @property
    def steps(self) -> int:
        return self.checks - self.examples


def machine(name: str) -> type[RuleBasedStateMachine]:
    """The unit tests' own."""
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
            count.examples += 1

        @invariant()
        def a_step_was_executed(self) -> None:
            count.checks += 1

    return Counted


def run(name: str, steps: int) -> dict[str, Any]:
    """Examples of one machine until `steps` steps were executed, or one failed."""
    count, failures = Count(), list[str]()
    chosen = counted(machine(name), count)
    with structlog.testing.capture_logs():
        while count.steps < steps and not failures:
            try:
                run_state_machine_as_test(seed(SEED + count.examples)(chosen), settings=EXAMPLES)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}"[:1000])
    return {"steps": count.steps, "examples": count.examples, "failures": failures}
