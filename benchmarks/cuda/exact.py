"""Exactness on the device: the project's own tests and comparisons, run there, in processes beside each other.

Nothing is compared here; what is, and by whose word, say the modules that are called. Knows cases and processes.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Cases, Raw
from benchmarks.clients import outcomes
from benchmarks.cuda.setup import Setup
from benchmarks.servers import REPOSITORY

TIE = 1e-3
"""Of the oracle's two best logits: the device adds up in another order."""
TESTS = REPOSITORY / "tests"
MARKED = "tests marked gpu"
CHOOSES = "DEVICE"
"""In the text of tests that run on CUDA where they are not interpreted. By themselves they say more than the tests that
run them there, whose name is …"""
RUNS_THEM = "test_on_the_device"
Told = list[dict[str, Any]]


def case_files(setup: Setup) -> list[str]:
    """Files of tests that run in a process of their own, on CUDA or interpreted; a smoke run has one of them."""
    found = sorted(TESTS.rglob("*_cases.py"))
    names = [str(path.relative_to(REPOSITORY)) for path in found if CHOOSES in path.read_text()]
    return [name for name in names if "lora" in name] if setup.is_smoke else names


def num_test_cases(setup: Setup) -> int:
    return len(case_files(setup)) + (not setup.is_smoke)


def tests(setup: Setup, finished: frozenset[str] = frozenset()) -> Cases:
    """One case per file of kernels' tests, and one for what is marked as needing a device."""
    options = ("-k", "embedding") if setup.is_smoke else ()
    interpreted = {"TRITON_INTERPRET": "0" if setup.is_cuda else "1"}
    for name in case_files(setup):
        if name not in finished:
            yield _gathered(name, outcomes(name, *options, **interpreted))
    if not setup.is_smoke and MARKED not in finished:
        yield _gathered(MARKED, outcomes("tests/shard", "-m", "gpu", "-k", f"not {RUNS_THEM}"))


def _gathered(name: str, found: Iterator[Case]) -> Case:
    """A file's tests as one case; one that was skipped has failed. No test at all is a failure of the case."""
    try:
        tests = list(found)
    except RuntimeError as failure:
        return Case(name, {}, str(failure)[:500])
    failed = {test.name: test.raw["why"] for test in tests if test.raw["failed"]}
    return Case(name, {"tests": len(tests), "failed": failed}, "" if tests else "no test ran")


def num_failed(raw: Raw) -> float:
    return float(len(raw["failed"]))


def architectures_of(setup: Setup) -> tuple[str, ...]:
    from tests import tiny  # imports torch, which reading results does not need

    return setup.architectures or tuple(tiny.VARIANTS)


def adapted_of(setup: Setup) -> tuple[str, ...]:
    from benchmarks.adapters_exact import ARCHITECTURES

    return setup.architectures or ARCHITECTURES


def architectures(setup: Setup, finished: frozenset[str] = frozenset()) -> Cases:
    """One case per architecture: greedy float32 text on the device, and on our CPU, against transformers'."""
    return _beside(setup, [name for name in architectures_of(setup) if name not in finished], _architecture)


def adapters(setup: Setup, finished: frozenset[str] = frozenset()) -> Cases:
    """One case per architecture: greedy tokens of a batch of many adapters against PEFT, also with few slots."""
    return _beside(setup, [name for name in adapted_of(setup) if name not in finished], _adapted)


def _architecture(name: str, device: str) -> Told:
    from benchmarks.architectures import run

    with tempfile.TemporaryDirectory() as folder:
        return run(name, Path(folder), device, TIE)


def _adapted(name: str, device: str) -> Told:
    from benchmarks.adapters_exact import FEW_SLOTS, check

    with tempfile.TemporaryDirectory() as folder:
        return [asdict(tried) for tried in check(name, Path(folder), (16, FEW_SLOTS), device, TIE)]


def _beside(setup: Setup, names: list[str], work: Callable[[str, str], Told]) -> Cases:
    """One case per name, as they are done; one that fails is a failed case of the run, not its end."""
    if setup.workers == 1:
        for name in names:
            yield _case(name, lambda name=name: work(name, setup.device))  # type: ignore[misc]
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(setup.workers, mp_context=spawn, initializer=_alone) as pool:
        futures: dict[Future[Told], str] = {pool.submit(work, name, setup.device): name for name in names}
        for future in as_completed(futures):
            yield _case(futures[future], future.result)


def _case(name: str, work: Callable[[], Told]) -> Case:
    try:
        return Case(name, {"runs": work()})
    except Exception as failure:
        return Case(name, {"runs": []}, f"{type(failure).__name__}: {failure}"[:500])


def _alone() -> None:
    """Of many processes each takes a core."""
    import torch

    torch.set_num_threads(1)


def ties(raw: Raw) -> float:
    return float(sum(run["num_ties"] for run in raw["runs"]))
