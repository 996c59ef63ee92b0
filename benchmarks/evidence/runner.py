"""Runs suites: one in this process, or several in a process each, so that what breaks one breaks no other.

Raw values are printed as they are measured, so that a run that is interrupted leaves what it has seen.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.evidence import results
from benchmarks.evidence.figure import Case, Cases, Suite
from benchmarks.evidence.results import REPOSITORY, Result

HOLDS, FAILED, MISSED = 0, 1, 3
"""Exit codes: every target is reached, something failed, some targets are missed."""


def run(suite: Suite, shared: Mapping[str, object], folder: Path | None = results.RESULTS) -> int:
    """Measure a suite, print its results and write them into `folder`, if it is not None. Returns an exit code."""
    start = time.monotonic()
    cases: list[Case] = []
    with contextlib.closing(suite.measure()) as measured:
        while case := _next(measured):
            cases.append(case)
            raw = json.dumps(case.raw, ensure_ascii=False)
            print(f"{suite.name}: {case.name} {'FAILED: ' + case.error if case.error else raw}", flush=True)
    seconds = time.monotonic() - start
    measured_figures = [results.result_of(figure, suite, cases, shared, seconds) for figure in suite.figures]
    if folder is not None:
        results.write(measured_figures, cases, folder)
    for result in measured_figures:
        print(line(result), flush=True)
    states = {result["status"] for result in measured_figures}
    return FAILED if states & {"failed", "void"} else MISSED if "missed" in states else HOLDS


def _next(cases: Cases) -> Case | None:
    """The next case; a measurement that raises is a failed case and the last."""
    try:
        return next(cases, None)
    except Exception as failure:  # a suite that breaks is a result too
        return Case("broken", {}, f"{type(failure).__name__}: {failure}"[:2000])


def line(result: Result) -> str:
    """A result for people."""
    target = "" if result["target"] is None else f", target {'≥' if result['at_least'] else '≤'} {result['target']}"
    value = f"{result['median']} {result['unit']} {result['interval']}{target}"
    return f"{result['figure']}: {value}: {result['status']} {result['reason'][:300]}".rstrip()


def run_apart(groups: Mapping[str, Sequence[str]], environment: Mapping[str, str], limit_s: float | None) -> int:
    """Run each command in a process. Returns the worst exit code."""
    codes: dict[str, int] = {}
    for name, command in groups.items():
        code = exit_code(command, environment, limit_s)
        if code is None:
            print(
                f"{name}: FAILED: stopped after {limit_s:.0f} s; run it again for the suites that are left", flush=True
            )
        codes[name] = code if code in (HOLDS, MISSED) else FAILED
    words = {HOLDS: "holds", MISSED: "missed", FAILED: "FAILED"}
    print("; ".join(f"{name} {words[code]}" for name, code in codes.items()))
    return worst(codes.values())


def exit_code(command: Sequence[str], environment: Mapping[str, str], limit_s: float | None) -> int | None:
    """Exit code of a process, None if it took too long. Everything that it started is killed."""
    with subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **environment}, process_group=0) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def worst(codes: Iterable[int]) -> int:
    """Exit code to end with after several of these."""
    distinct = set(codes)
    return FAILED if FAILED in distinct else MISSED if MISSED in distinct else HOLDS


def exit_on_sigterm() -> None:
    """So that servers under measurement are stopped with the measurement."""
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
