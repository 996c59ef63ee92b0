"""The tests of all kernels on the device, in parallel."""

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.setup import Setup

ROOT = Path(__file__).parents[3]
PATTERN, SMOKE_FILE = "*_cases.py", "grammar/triton_cases.py"
MOST_NAMED = 40
SPARE_CORES = 2


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    rows.check("tests of kernels", lambda: _run(rows, setup))


def _run(rows: Rows, setup: Setup) -> Row:
    tests = ROOT / "tests" / "shard"
    files = sorted(tests.rglob(PATTERN)) if setup.is_cuda else [tests / SMOKE_FILE]
    jobs = max(1, len(os.sched_getaffinity(0)) - SPARE_CORES) if setup.is_cuda else 0
    # warnings are those of the card's packages
    options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "--tb=short", "--maxfail=60"]
    options += ["-n", str(jobs), "--dist", "worksteal"] if jobs else []
    log = rows.log("pytest")
    interpreted = {"TRITON_INTERPRET": "0" if setup.is_cuda else "1"}
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    with log.open("w") as file:
        code = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=file, check=False, env=os.environ | interpreted
        ).returncode
    lines = log.read_text().splitlines()
    for line in [line for line in lines if line.startswith(("FAILED", "ERROR"))][:MOST_NAMED]:
        rows.put(line[:200], ok=False)
    last = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "no test ran")
    return {"ok": code == 0, "tests": last.strip("= ")[:150]}
