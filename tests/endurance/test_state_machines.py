"""The state machines of the unit tests for ten thousand steps each."""

import pytest

from tests.endurance import state_machines


@pytest.mark.long
@pytest.mark.parametrize("steps", [200, state_machines.STEPS])
@pytest.mark.parametrize("name", state_machines.NAMES)
def test_a_state_machine_keeps_its_invariants(name: str, steps: int) -> None:
    found = state_machines.run(name, steps)
    assert found["failures"] == []
    assert found["steps"] >= steps
