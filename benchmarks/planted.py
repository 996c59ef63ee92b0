"""Every fault of tests/mutants is planted in a copy of the tree, and the test named for it must fail by a wrong value;
before it, the same test must pass in a copy without the fault.

    python -m benchmarks.planted
"""

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Cases, Raw
from tests.mutants.faults import FAULTS, OF_DEVICES, OF_RECOVERY
from tests.mutants.mutant import Mutant, copy_tree, is_noticed, results

NUM_FAULTS, NUM_OF_RECOVERY, NUM_OF_DEVICES = len(FAULTS), len(OF_RECOVERY), len(OF_DEVICES)
SETTINGS: dict[str, Any] = {"faults": NUM_FAULTS}
SETTINGS_OF_RECOVERY: dict[str, Any] = {"faults": NUM_OF_RECOVERY}
SETTINGS_OF_DEVICES: dict[str, Any] = {"faults": NUM_OF_DEVICES}


def measure(finished: frozenset[str] = frozenset(), faults: Sequence[Mutant] = FAULTS) -> Cases:
    """One case per fault."""
    passed: dict[str, bool] = {}
    for fault in faults:
        if fault.name in finished:
            continue
        with tempfile.TemporaryDirectory() as folder:
            sound, planted = Path(folder) / "sound", Path(folder) / "planted"
            if fault.test not in passed:
                passed[fault.test] = not any(results(copy_tree(sound), [fault.test]))
            reason = is_noticed(fault, copy_tree(planted))
        if not passed[fault.test]:
            reason = f"{fault.test} fails without a fault"
        yield Case(fault.name, {"test": fault.test, "noticed": not reason, "reason": reason})


def of_recovery(finished: frozenset[str] = frozenset()) -> Cases:
    """Those of what outlives an end."""
    return measure(finished, OF_RECOVERY)


def of_devices(finished: frozenset[str] = frozenset()) -> Cases:
    """Those of models on devices, one or several."""
    return measure(finished, OF_DEVICES)


def num_unnoticed(raw: Raw) -> float:
    return float(not raw["noticed"])


if __name__ == "__main__":
    lost = 0
    for case in itertools.chain(measure(), of_recovery(), of_devices()):
        print(f"{case.name}: {case.raw['reason'] or 'noticed'}", flush=True)
        lost += not case.raw["noticed"]
    sys.exit(lost > 0)
