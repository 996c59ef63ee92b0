"""Measures the figures of the CUDA device at hand: groups of suites in a process each, ten minutes at most.

    python -m benchmarks.cuda [--suite NAME …] [--out FOLDER] [--commit NAME] | --smoke | --list

Exit code 0: every target is reached. 3: some are missed. 1: something failed or took too long.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cuda.setup import SMOKE, Setup, fitted
from benchmarks.cuda.suites import suites
from benchmarks.evidence import arguments, results, runner
from benchmarks.evidence.figure import Suite

LIMIT_S = 590.0
SMOKE_RESULTS = results.RESULTS.parent / ".runs" / "cuda-smoke"


def run_here(chosen: Sequence[Suite], setup: Setup, options: argparse.Namespace) -> int:
    """All of these in this process."""
    from benchmarks.cuda import speeds  # torch

    folder = options.out or folder_of(setup)
    copy = speeds.measured(setup, setup.small).copy
    shared = results.facts(options.commit, {"copy_gb_per_s": round(copy / 1e9, 1), **card(setup)})
    codes = [runner.HOLDS]
    for suite in chosen:
        code = runner.run(suite, shared, folder)
        codes.append(runner.HOLDS if code == runner.MISSED and setup.is_smoke else code)
    return runner.worst(codes)


def card(setup: Setup) -> dict[str, object]:
    """What figures depend on in addition to the host."""
    if not setup.is_cuda:
        return {}
    import torch

    found = torch.cuda.get_device_properties(setup.device)
    return {
        "gpu": found.name,
        "gpu_memory_mib": found.total_memory >> 20,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": results.printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def folder_of(setup: Setup) -> Path:
    """The folder of a card's results: `NVIDIA H200` has h200."""
    if not setup.is_cuda:
        return SMOKE_RESULTS
    import torch

    words = torch.cuda.get_device_name(setup.device).lower().split()
    return results.RESULTS / "-".join(word for word in words if word != "nvidia")


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments.parser(__doc__)
    arguments.add_suites(parser, suites(SMOKE))
    parser.add_argument("--smoke", action="store_true", help="every suite with tiny shapes on CPU: times mean nothing")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--commit", default="", help="which this is an unchanged copy of, if there is no repository")
    parser.add_argument("--list", action="store_true", help="suites and figures")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args(given)
    runner.exit_on_sigterm()
    setup = SMOKE if options.smoke else _setup()
    asked = [each for each in suites(setup) if each.is_among(options.suite)]
    if options.list:
        for suite in asked:
            print(suite.name, *(f"\n    {figure.name}: {suite.num_cases} cases" for figure in suite.figures))
        return runner.HOLDS
    if not (setup.is_smoke or _has_device()):
        parser.error("needs a CUDA device; --smoke runs every suite with tiny shapes on CPU")
    if options.here:
        return run_here(asked, setup, options)
    passed = ["--smoke"] if options.smoke else []
    passed += ["--out", str(options.out.resolve())] if options.out else []
    passed += ["--commit", options.commit] if options.commit else []
    groups: dict[str, list[str]] = {}
    for suite in asked:
        command = groups.setdefault(suite.group, [sys.executable, "-m", "benchmarks.cuda", "--here", *passed])
        command += ["--suite", suite.name]
    return runner.run_apart(groups, {"TRITON_INTERPRET": "1"} if setup.is_smoke else {}, LIMIT_S)


def _setup() -> Setup:
    """Setup for the card at hand; at full size where there is none, for a list."""
    import torch

    if not torch.cuda.is_available():
        return Setup()
    return fitted(Setup(), torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_capability(0))


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
