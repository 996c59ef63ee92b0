"""Runs every bar at full size and writes what was seen, missed and failed runs included, to results/proof.json.

A part is at most ten minutes long. One that was interrupted goes on where it stopped when its settings and the measured
code are the same. Knows files, commits and verdicts; `benchmarks/bars.py` is the list.

    python -m benchmarks.proof [--part NAME …] [--budget SECONDS] | --list | --check
"""

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import entries, history
from benchmarks.bars import BARS, PARTS
from benchmarks.case import Bar, Case, Cases, Part
from benchmarks.entries import machine, versions

RESULTS = Path(__file__).parent / "results" / "proof.json"
RUNS = Path(__file__).parent / ".runs"
BUDGET_S = 585.0


@dataclass
class Run:
    """A part under way: what must stay the same for its finished cases to count."""

    part: str
    commit: str
    settings: dict[str, Any]
    began: str
    cases: list[Case] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def path(self) -> Path:
        return RUNS / f"{self.part}.json"

    def save(self) -> None:
        RUNS.mkdir(exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(self.path)


def resume(part: Part) -> Run:
    """The interrupted run of a part, or a new one."""
    commit = history.head()
    settings = json.loads(json.dumps(dict(part.settings)))
    path = RUNS / f"{part.name}.json"
    if path.exists():
        saved = json.loads(path.read_text())
        if saved["settings"] == settings and history.same_code(saved["commit"], commit):
            return Run(**{**saved, "cases": [Case(**case) for case in saved["cases"]]})
    return Run(part.name, commit, settings, datetime.now(UTC).isoformat(timespec="seconds"))


def run(part: Part, budget_s: float) -> bool:
    """Measure what is missing of a part. True when it is complete and its entries are written."""
    current = resume(part)
    wanted = max(bar.num_cases for bar in bars_of(part))
    start = time.monotonic()
    with contextlib.closing(part.measure(frozenset(case.name for case in current.cases))) as cases:
        while case := _next(cases):
            current.cases.append(case)
            before, current.seconds = current.seconds, current.seconds + time.monotonic() - start
            start = time.monotonic()
            current.save()
            print(f"{part.name}: {case.name} {'FAILED: ' + case.error if case.error else 'measured'}", flush=True)
            budget_s -= current.seconds - before
            if budget_s < current.seconds / len(current.cases) and len(current.cases) < wanted:
                print(f"{part.name}: time is up after {len(current.cases)} cases; run it again to go on", flush=True)
                return False
    write([entry(bar, part, current) for bar in bars_of(part)])
    current.path.unlink(missing_ok=True)
    return True


def _next(cases: Cases) -> Case | None:
    """The next case; a measurement that breaks is a failed case and the last."""
    try:
        return next(cases, None)
    except Exception as failure:  # whatever broke belongs into the file
        return Case("broken", {}, f"{type(failure).__name__}: {failure}"[:2000])


def names(part: Part) -> set[str]:
    """What a part is chosen by: its own name, and the word before the dash, which stands for all that begin so."""
    return {part.name, part.name.partition("-")[0]}


def bars_of(part: Part) -> list[Bar]:
    return [bar for bar in BARS if bar.part == part.name]


def entry(bar: Bar, part: Part, run: Run) -> dict[str, Any]:
    """What proof.json says about one bar."""
    facts = {
        "commit": run.commit,
        "changed": history.changed(),
        "began": run.began,
        "seconds": round(run.seconds, 1),
        "settings": run.settings,
        "machine": machine(),
        "versions": versions(),
    }
    return entries.entry(bar, part, run.cases, facts)


def write(entries: Sequence[dict[str, Any]]) -> None:
    """Add entries; nothing that is in the file leaves it."""
    RESULTS.parent.mkdir(exist_ok=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    unfinished = RESULTS.with_suffix(".part")
    unfinished.write_text(json.dumps([*kept, *entries], indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(RESULTS)
    for told in entries:
        sign = "≥" if told["at_least"] else "≤"
        wanted = "" if told["wanted"] is None else f", wanted {sign} {told['wanted']} {told['unit']}"
        print(f"{told['bar']}: {told['measured']} {told['unit']} {told['spread']}{wanted}: {told['verdict']}")


def latest(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The newest entry of each bar."""
    return {told["bar"]: told for told in entries}


def standing(entries: Sequence[dict[str, Any]], commit: str) -> dict[str, str]:
    """For each declared bar why it does not stand at `commit`, or an empty text."""
    newest = latest(entries)
    return {bar.name: _missing(newest.get(bar.name), commit) for bar in BARS}


def _missing(told: dict[str, Any] | None, commit: str) -> str:
    if told is None:
        return "never measured"
    if told["verdict"] != "holds":
        return f"{told['verdict']}: {told['measured']} {told['reason']}".strip()
    if told["changed"]:
        return f"measured with uncommitted changes: {', '.join(told['changed'][:3])}"
    return "" if history.same_code(told["commit"], commit) else f"measured at {told['commit'][:10]}, which differs"


def check() -> int:
    """Say which bars stand at HEAD."""
    entries = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    state = standing(entries, history.head())
    for name, reason in state.items():
        print(f"{'stands' if not reason else 'MISSING'}  {name}  {reason}")
    return int(any(state.values()))


def _end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=sorted({name for part in PARTS for name in names(part)}))
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which a part stops to be resumed")
    parser.add_argument("--list", action="store_true", help="parts and bars")
    parser.add_argument("--check", action="store_true", help="which bars stand at HEAD")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)  # so that servers under measurement end with us
    if arguments.check:
        return check()
    chosen = [part for part in PARTS if not arguments.part or not names(part).isdisjoint(arguments.part)]
    if arguments.list:
        for part in chosen:
            print(part.name, *(f"\n    {bar.name}: {bar.num_cases} cases" for bar in bars_of(part)))
        return 0
    if arguments.part:
        complete = [run(part, arguments.budget) for part in chosen]
        return 0 if all(complete) else 3
    for part in chosen:
        while not run(part, arguments.budget):
            pass
    return check()


if __name__ == "__main__":
    sys.exit(main())
