"""Check the card at hand: is everything right, how fast is it, and where does the time go?

    python -m benchmarks.cuda.check [--only STAGE …] [--budget SECONDS] [--out FOLDER] [--compare FILE]
                                    [--beside FOLDER] [--smoke]

Each stage is a process with a time limit. One that crashes begins again behind the check that crashed; one that hangs
is ended. The table comes last, also after SIGTERM: at most 9 000 characters, what is wrong first. Exit code 0: all is
right.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cuda.check.rows import CURRENT, FILE, LOGS, Rows, read, table
from benchmarks.cuda.check.stages import BOTH, STAGES, USUAL, run
from benchmarks.evidence import arguments

ROOT = Path(__file__).parents[3]
SLOW = 3
"""A smoke run's stages may take so many times their limit: its processor is not a card."""
LEAST_S = 15.0
"""A stage for which less time is left does not begin."""


@dataclass(frozen=True)
class Run:
    """A run of some stages on one tree."""

    out: Path
    is_smoke: bool = False
    product: Path | None = None
    """Another tree, whose `src` is measured; None is this one."""
    is_brief: bool = False

    def command(self, stage: str, done: Sequence[str] = ()) -> list[str]:
        flags = ["--smoke"] * self.is_smoke + ["--brief"] * self.is_brief + [f"--done={name}" for name in done]
        return [sys.executable, "-m", "benchmarks.cuda.check", "--stage", stage, "--out", str(self.out), *flags]

    def environment(self) -> dict[str, str]:
        tree = self.product or ROOT
        path = os.pathsep.join([str(tree / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        smoke = {"TRITON_INTERPRET": "1"} if self.is_smoke else {}
        memory = {"PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")}
        return os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1"} | smoke | memory

    @contextlib.contextmanager
    def running(self, stage: str, done: Sequence[str] = ()) -> Iterator["subprocess.Popen[bytes]"]:
        """The stage in a process group of its own, which is killed at the end."""
        process = subprocess.Popen(self.command(stage, done), cwd=ROOT, env=self.environment(), process_group=0)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def limit(self, stage: str) -> float:
        return STAGES[stage].limit_s * (SLOW if self.is_smoke else 1)

    def stage(self, name: str, limit_s: float) -> None:
        """Run a stage to its end; again behind a check that crashed it."""
        end, done = time.monotonic() + limit_s, list[str]()
        current = self.out / CURRENT
        while not done or time.monotonic() < end - LEAST_S:
            current.unlink(missing_ok=True)
            with self.running(name, done) as process:
                try:
                    code = process.wait(max(LEAST_S, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = None
            if code == 0:
                return
            check = current.read_text() if current.exists() else "start"
            error = "did not end in time" if code is None else f"ended with exit code {code}"
            Rows(self.out, name).put(check, ok=False, error=error)
            if code is None or check in done or check == "start":
                return
            done = sorted({check, *(row["name"] for row in read(self.out) if row["stage"] == name)})


def run_all(here: Run, names: Sequence[str], budget_s: float) -> None:
    """The stages in this order; kernels are compiled during the first of the others."""
    end = time.monotonic() + budget_s
    with contextlib.ExitStack() as stack:
        compiling: subprocess.Popen[bytes] | None = None
        for name in names:
            left = end - time.monotonic()
            if left < LEAST_S:
                Rows(here.out, name).put("not begun", ok=False, error="no time was left: see --budget and --only")
            elif name == "warm" and len(names) > 1:
                compiling = stack.enter_context(here.running(name))
            else:
                if compiling is not None and STAGES[name].is_compiled:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        compiling.wait(here.limit("warm"))
                    compiling = None
                here.stage(name, min(here.limit(name), end - time.monotonic()))


def run_both(here: Run, other: Run, names: Sequence[str], budget_s: float) -> None:
    """Each stage on this tree, then on the other, on the same warm card."""
    end = time.monotonic() + budget_s
    for name in names:
        for tree in (here, other):
            left = end - time.monotonic()
            if left < LEAST_S:
                Rows(tree.out, name).put("not begun", ok=False, error="no time was left: see --budget and --only")
            else:
                tree.stage(name, min(here.limit(name), left))


def finish(out: Path, head: str, earlier: Path | None) -> int:
    """Print the table and write it. Returns the exit code."""
    rows = read(out)
    text = table(head, rows, read(earlier) if earlier else ())
    (out / "table.txt").write_text(text + "\n")
    (out / CURRENT).unlink(missing_ok=True)
    logs = out / LOGS
    if logs.exists():
        with tarfile.open(out / "logs.tar.xz", "w:xz") as archive:
            archive.add(logs, LOGS)
        shutil.rmtree(logs)
    print("\n" + text, flush=True)
    return 0 if rows and all(row.get("ok", True) for row in rows) else 1


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--budget", type=float, help="seconds for all stages; 480, with another tree 530")
    parser.add_argument(
        "--out", type=Path, help="folder of the results, at most 8 files; emptied of those of a run before"
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="rows.jsonl of an earlier run: adds ratios to it")
    parser.add_argument(
        "--beside", dest="other", type=Path, metavar="FOLDER", help="another tree: each stage on it, too, by turns"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, to test the check itself")
    parser.add_argument("--brief", action="store_true", help="leave out profiles and swaps")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--done", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.stage:
        rows = Rows(options.out, options.stage, frozenset(options.done))
        return run(options.stage, rows, options.smoke, options.brief)
    if options.compare is not None and (options.other is not None or not options.compare.exists()):
        parser.error(f"--compare {options.compare}: no such file, or --beside is given too")
    if options.other is not None and not (options.other / "src" / "lorikeet").is_dir():
        parser.error(f"--beside {options.other}: it has no src/lorikeet")
    names = [name for name in STAGES if name in (options.only or (BOTH if options.other else USUAL))]
    out = options.out or Path(tempfile.gettempdir(), "gpu-check")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).unlink(missing_ok=True)
    budget = options.budget or (530.0 if options.other else 480.0) * (SLOW if options.smoke else 1)
    began, earlier = time.monotonic(), options.compare
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = 1
    try:
        here = Run(out, options.smoke, is_brief=options.brief or options.other is not None)
        if options.other is None:
            run_all(here, names, budget)
        else:
            earlier = out / "other"
            earlier.mkdir(exist_ok=True)
            (earlier / FILE).unlink(missing_ok=True)
            other = Run(earlier, options.smoke, options.other.resolve(), is_brief=True)
            run_both(here, other, names, budget)
    finally:
        code = finish(out, f"gpu-check: {time.monotonic() - began:.0f} s of {budget:.0f}", earlier)
    return code


if __name__ == "__main__":
    sys.exit(main())
