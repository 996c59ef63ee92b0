"""The command line that benchmarks share: options for rounds and a small run.

No benchmark measures before its arguments are parsed, so `--help` never starts one.
"""

import argparse
from collections.abc import Iterable

from benchmarks.evidence.figure import Suite


def parser(doc: str | None, *, rounds: int = 0, quick: bool = False) -> argparse.ArgumentParser:
    """A parser described by a module's docstring. `rounds` is the default of --rounds, which exists if it isn't 0."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        result.add_argument("--rounds", type=int, default=rounds, help=f"rounds to measure (default {rounds})")
    if quick:
        result.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    return result


def add_suites(parser: argparse.ArgumentParser, suites: Iterable[Suite]) -> None:
    """The option that names suites or groups of them, any number of times."""
    names = sorted({name for suite in suites for name in (suite.name, suite.group)})
    text = f"a suite, or a group of them: {', '.join(names)}"
    parser.add_argument("--suite", action="append", choices=names, metavar="NAME", help=text)
