"""How long `lorikeet-adapters check` takes for a catalogue of 200 adapters, five of them broken.

python -m benchmarks.adapters.catalogue_check [--quick]
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, raw_value
from benchmarks.load import adapted
from tests.endurance import catalogue

ROUNDS = 5
ADAPTERS, BROKEN = catalogue.COUNT, catalogue.PLACES


def measure(base: adapted.Base | None = None, rounds: int = ROUNDS) -> Cases:
    """One case per round."""
    base = base or adapted.full()
    with tempfile.TemporaryDirectory() as folder, catalogue.written(base, Path(folder)) as (path, broken):
        for number in range(rounds):
            raw = catalogue.checked(base, path, broken)
            error = f"wrong about {raw['misjudged']}" if raw["misjudged"] else ""
            yield Case(f"round {number}", {"seconds": raw["seconds"]}, error)


if __name__ == "__main__":
    chosen = arguments.parser(__doc__, rounds=ROUNDS, quick=True).parse_args()
    cases = measure(adapted.small(), 1) if chosen.quick else measure(None, chosen.rounds)
    sys.exit(arguments.print_cases(cases, {"seconds": partial(raw_value, "seconds")}))
