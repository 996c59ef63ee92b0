"""Measures suites of published figures, each in a process of its own, and writes the pages that show them.

Without names it lists all suites: how long each takes, and when its figures were measured.

    python -m benchmarks.proof [--suite NAME … | --all] [--here | --trial]
"""

import sys
from collections.abc import Mapping, Sequence

from benchmarks import report
from benchmarks.evidence import arguments, results, runner
from benchmarks.evidence.figure import Suite
from benchmarks.evidence.results import Result
from benchmarks.figures import SUITES


def listed(suites: Sequence[Suite], known: Mapping[str, Result]) -> str:
    """A line per suite and per figure."""
    lines = []
    for suite in suites:
        seconds = max((known[figure.name]["seconds"] for figure in suite.figures if figure.name in known), default=None)
        lines.append(suite.name if seconds is None else f"{suite.name} ({seconds:.0f} s)")
        for figure in suite.figures:
            result = known.get(figure.name)
            state = "never measured" if result is None else f"{result['status']}, {result['date'][:10]}"
            lines.append(f"    {figure.name}: {state}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = arguments.parser(__doc__)
    arguments.add_suites(parser, SUITES)
    parser.add_argument("--all", action="store_true", help="measure every suite")
    parser.add_argument("--here", action="store_true", help="measure in this process, and write no pages")
    parser.add_argument("--trial", action="store_true", help="measure in this process, and write nothing")
    options = parser.parse_args(words)
    runner.exit_on_sigterm()
    suites = [suite for suite in SUITES if suite.is_among(options.suite)]
    if not (options.suite or options.all):
        print(listed(suites, results.latest()))
        return 0
    if options.here or options.trial:
        shared = results.facts()
        folder = None if options.trial else results.RESULTS
        return runner.worst(runner.run(suite, shared, folder) for suite in suites)
    command = [sys.executable, "-m", "benchmarks.proof", "--here", "--suite"]
    code = runner.run_apart({suite.name: [*command, suite.name] for suite in suites}, {}, None)
    for path in report.write():
        print(f"wrote {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
