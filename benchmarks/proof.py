"""Prints which figures are out of date and how long they take, then measures those and writes the pages that show them.

A figure is out of date if it was never measured, or if the code it depends on or its settings have changed since.

    python -m benchmarks.proof [--suite NAME …] [--all] [--list]
"""

import sys
from collections.abc import Sequence

from benchmarks import report
from benchmarks.catalogue import SUITES
from benchmarks.evidence import arguments, results, runner
from benchmarks.evidence.figure import Suite
from benchmarks.evidence.results import Result


def plan(suites: Sequence[Suite], known: dict[str, Result], is_all: bool) -> list[Suite]:
    """Print what is out of date, and return the suites to measure."""
    chosen = []
    total = 0.0
    for suite in suites:
        reason = results.out_of_date(suite, known) or ("asked for" if is_all else "")
        if not reason:
            continue
        seconds = [known[figure.name]["seconds"] for figure in suite.figures if figure.name in known]
        total += max(seconds, default=0.0)
        duration = f"{max(seconds):.0f} s" if seconds else "unknown"
        print(f"{suite.name} ({duration}): {reason}")
        for figure in suite.figures:
            print(f"    {figure.name}")
        chosen.append(suite)
    print(f"{len(chosen)} of {len(suites)} suites, about {total / 60:.0f} min")
    return chosen


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments.parser(__doc__)
    arguments.add_suites(parser, SUITES)
    parser.add_argument("--all", action="store_true", help="measure also what is up to date")
    parser.add_argument("--list", action="store_true", help="only print what is out of date")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    options = parser.parse_args(given)
    runner.exit_on_sigterm()
    asked = [each for each in SUITES if each.is_among(options.suite)]
    if options.here:
        shared = results.facts()
        return runner.worst(runner.run(suite, shared) for suite in asked)
    chosen = plan(asked, results.latest(), options.all)
    if options.list or not chosen:
        return 0
    command = [sys.executable, "-m", "benchmarks.proof", "--here", "--suite"]
    code = runner.run_apart({suite.name: [*command, suite.name] for suite in chosen}, {}, None)
    for path in report.write():
        print(f"wrote {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
