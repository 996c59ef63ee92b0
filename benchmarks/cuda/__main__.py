"""Measures the bars on the CUDA device at hand: parts that belong together in a process of their own, ten minutes each.

    python -m benchmarks.cuda [--part NAME …] [--again] [--out FOLDER] [--commit NAME] | --smoke | --list

Exit code 0: every bar that was measured holds. 3: some are missed. 1: something failed or took too long.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.case import Case, Cases, Part
from benchmarks.cuda import record
from benchmarks.cuda.plan import Plan, group_of, plan
from benchmarks.cuda.setup import SMOKE, Setup
from benchmarks.servers import REPOSITORY

LIMIT_S = 590.0
HOLDS, FAILED, MISSED = 0, 1, 3


def measure(whole: Plan, part: Part, setup: Setup, folder: Path, facts: dict[str, object]) -> int:
    """Run one part and write what it gave, from its first case on."""
    recording = record.Recording(part, whole.bars_of(part), folder, facts)
    wanted = max(bar.num_cases for bar in recording.bars)
    with contextlib.closing(part.measure(frozenset())) as cases:
        while case := _next(cases):
            recording.cases.append(case)
            print(f"{part.name}: {case.name} {'FAILED: ' + case.error if case.error else 'measured'}", flush=True)
            if len(recording.cases) < wanted:
                recording.write(is_whole=False)
    told = recording.write(is_whole=True)
    for each in told:
        sign = "≥" if each["at_least"] else "≤"
        bar = "" if each["wanted"] is None else f", wanted {sign} {each['wanted']}"
        print(f"{each['bar']}: {each['measured']} {each['unit']} {each['spread']}{bar}: {each['verdict']}", flush=True)
    states = {each["verdict"] for each in told}
    if not states <= {"holds", "missed"}:
        return FAILED
    return MISSED if "missed" in states and not setup.is_smoke else HOLDS


def _next(cases: Cases) -> Case | None:
    """The next case; a measurement that breaks is a failed case and the last."""
    try:
        return next(cases, None)
    except Exception as failure:  # whatever broke belongs into the file
        return Case("broken", {}, f"{type(failure).__name__}: {failure}"[:2000])


def run_here(parts: Sequence[Part], whole: Plan, setup: Setup, options: argparse.Namespace) -> int:
    """All of these in this process, but for those that are finished."""
    folder = options.out or record.folder_of(setup)
    commit = record.Commit.of_tree(options.commit)
    codes = [HOLDS]
    facts: dict[str, object] = {}
    for part in parts:
        known = [*record.read(record.folder_of(setup) / f"{group_of(part)}.json")]
        known += record.read(folder / f"{group_of(part)}.json") if options.out else []
        settings = record.as_read(part.settings)
        if not options.again and record.is_finished(whole.bars_of(part), known, commit, settings):
            print(f"{part.name}: finished at this commit; --again measures it once more", flush=True)
            continue
        facts = facts or _facts(setup, commit)
        codes.append(measure(whole, part, setup, folder, facts))
    return worst(codes)


def _facts(setup: Setup, commit: record.Commit) -> dict[str, object]:
    from benchmarks.cuda import speeds  # torch

    return {
        "commit": commit.name,
        "changed": list(commit.changed),
        "machine": record.machine(setup, speeds.measured(setup, setup.small).copy),
        "versions": record.versions(),
    }


def run_apart(groups: Mapping[str, Sequence[str]], arguments: Sequence[str], setup: Setup) -> int:
    """Each group's parts in a process of their own: what breaks the device in one breaks it for no other."""
    codes: dict[str, int] = {}
    interpreted = {"TRITON_INTERPRET": "1"} if setup.is_smoke else {}
    for group, parts in groups.items():
        named = [word for name in parts for word in ("--part", name)]
        command = [sys.executable, "-m", "benchmarks.cuda", "--here", *named, *arguments]
        code = exit_code(command, interpreted, LIMIT_S)
        if code is None:
            print(f"{group}: FAILED: ended after {LIMIT_S:.0f} s; run it again for the parts that are left", flush=True)
        codes[group] = code if code in (HOLDS, MISSED) else FAILED
    words = {HOLDS: "holds", MISSED: "missed", FAILED: "FAILED"}
    print("; ".join(f"{group} {words[code]}" for group, code in codes.items()))
    return worst(codes.values())


def exit_code(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> int | None:
    """Of a process, None where it took too long. Nothing that it started is left."""
    with subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **environment}, process_group=0) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def worst(codes: Iterable[int]) -> int:
    """Of several exit codes the one to end with."""
    found = set(codes)
    return FAILED if FAILED in found else MISSED if MISSED in found else HOLDS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", help="a part, or the word that parts begin with")
    parser.add_argument("--smoke", action="store_true", help="every part with tiny shapes on CPU: times mean nothing")
    parser.add_argument("--again", action="store_true", help="measure also what is finished at this commit")
    parser.add_argument("--out", type=Path, help="folder of the files of results")
    parser.add_argument("--commit", default="", help="which this is an unchanged copy of, where there is no repository")
    parser.add_argument("--list", action="store_true", help="parts and bars")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args(arguments)
    setup = SMOKE if options.smoke else Setup()
    whole = plan(setup)
    names = {name for part in whole.parts for name in (part.name, group_of(part))}
    if unknown := set(options.part or ()) - names:
        parser.error(f"no part called {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    asked = [part for part in whole.parts if not options.part or {part.name, group_of(part)} & set(options.part)]
    if options.list:
        for part in asked:
            print(part.name, *(f"\n    {bar.name}: {bar.num_cases} cases" for bar in whole.bars_of(part)))
        return HOLDS
    if not (setup.is_smoke or _has_device()):
        parser.error("needs a CUDA device; --smoke runs every part with tiny shapes on CPU")
    if options.here:
        return run_here(asked, whole, setup, options)
    passed = [f"--{name}" for name in ("smoke", "again") if getattr(options, name)]
    passed += ["--out", str(options.out.resolve())] if options.out else []
    passed += ["--commit", options.commit] if options.commit else []
    chosen: dict[str, list[str]] = {}
    for part in asked:
        chosen.setdefault(group_of(part), []).append(part.name)
    return run_apart(chosen, passed, setup)


def _end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # so that processes under measurement end with us
    sys.exit(main())
