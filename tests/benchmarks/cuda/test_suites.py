"""What there is to measure on a device: suites, figures and how many cases each has."""

from importlib import import_module

import pytest

from benchmarks.cuda import setup as shapes
from benchmarks.cuda.setup import SMOKE, Setup
from benchmarks.cuda.suites import suites
from tests.shard.apart import KernelsApart
from tests.test_layering import ROOT, reached

FULL, SMALL = suites(Setup()), suites(SMOKE)
CHOOSES = "DEVICE"
"""In the text of kernels' tests that run on CUDA if they are not interpreted."""


def test_figures_have_different_names() -> None:
    names = [figure.name for suite in FULL for figure in suite.figures]
    assert len(set(names)) == len(names)


def test_suites_run_in_nine_processes() -> None:
    groups = list(dict.fromkeys(suite.group for suite in FULL))
    assert groups == [
        *("bandwidth", "attention", "decode", "loads", "adapters", "swap", "speculation", "start", "kernels")
    ]


def test_a_smoke_run_has_every_suite_and_figure() -> None:
    assert [suite.name for suite in SMALL] == [suite.name for suite in FULL]
    loads = 3 * 2 * (len(Setup().loads) - len(SMOKE.loads))  # three figures of each load, for two pairs of models
    count = [sum(len(suite.figures) for suite in some) for some in (SMALL, FULL)]
    assert count[0] == count[1] - loads


@pytest.mark.parametrize(
    ("gigabytes", "capability", "model", "dtype", "requests"),
    [
        (15, (7, 5), shapes.LLAMA_3B, "float16", 32),
        (24, (8, 9), shapes.LLAMA_8B, "bfloat16", 32),
        (40, (8, 0), shapes.LLAMA_8B, "bfloat16", 32),
        (79, (9, 0), shapes.LLAMA_8B, "bfloat16", 64),
    ],
)
def test_a_smaller_card_measures_less(
    gigabytes: int, capability: tuple[int, int], model: shapes.LlamaShape, dtype: str, requests: int
) -> None:
    setup = shapes.fitted(Setup(), gigabytes * shapes.GIB, capability)
    assert (setup.large, setup.dtype, setup.requests) == (model, dtype, requests)
    assert [suite.name for suite in suites(setup)] == [suite.name for suite in FULL]


def test_suites_are_listed_without_torch() -> None:
    assert "torch" not in reached(ROOT / "benchmarks/cuda/suites.py")


def test_every_file_of_tests_for_devices_is_run() -> None:
    found = {path for path in (ROOT / "tests").rglob("*_cases.py") if CHOOSES in path.read_text()}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "(KernelsApart)" in path.read_text():
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    running = {path for kind in KernelsApart.__subclasses__() for path in kind.cases}
    running.add(ROOT / "tests/shard/model/graphs_triton_cases.py")  # by test_graphs.py
    assert found == running and len(running) > 1


def test_shapes_of_attention_cover_every_kind_and_context() -> None:
    names = [step.name for step in shapes.steps(Setup())]
    assert len(set(names)) == len(names) == 17
    assert {name.split()[0] for name in names} == {"decode", "verification", "prefill"}
    assert all(f"decode {load} x 1 in {context}" in names for load in (1, 8, 64) for context in (1024, 8192, 32_768))
