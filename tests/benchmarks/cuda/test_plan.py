"""What there is to measure: parts, bars and how many cases each has."""

from importlib import import_module

from benchmarks.cuda import shapes
from benchmarks.cuda.plan import group_of, plan
from benchmarks.cuda.setup import SMOKE, Setup
from tests.test_layering import ROOT, reached

FULL = plan(Setup())


def test_bars_and_parts_belong_together() -> None:
    names = [bar.name for bar in FULL.bars]
    assert len(set(names)) == len(names)
    assert {bar.part for bar in FULL.bars} == {part.name for part in FULL.parts}
    for part in FULL.parts:
        assert len({bar.num_cases for bar in FULL.bars_of(part)}) == 1


def test_parts_have_eight_files() -> None:
    groups = list(dict.fromkeys(group_of(part) for part in FULL.parts))
    assert groups == ["bandwidth", "decode", "adapters", "swap", "exact", "speculation", "start", "kernels"]


def test_a_smoke_run_has_every_part_and_bar() -> None:
    smoke = plan(SMOKE)
    assert [part.name for part in smoke.parts] == [part.name for part in FULL.parts]
    assert {bar.part for bar in smoke.bars} == {bar.part for bar in FULL.bars}
    loads = 3 * 2 * (len(Setup().loads) - len(SMOKE.loads))  # three bars of each load, for two pairs of models
    assert len(smoke.bars) == len(FULL.bars) - loads


def test_what_is_to_be_measured_is_listed_without_torch() -> None:
    assert "torch" not in reached(ROOT / "benchmarks/cuda/shapes.py")
    assert "torch" not in reached(ROOT / "benchmarks/cuda/setup.py")


def test_declared_numbers_of_cases_are_those_that_exist() -> None:
    from benchmarks.cuda import exact, logits, lossless

    declared = {bar.part: bar.num_cases for bar in FULL.bars}
    full = Setup()
    assert declared["exact-architectures"] == len(exact.architectures_of(full))
    assert declared["exact-adapters"] == len(exact.adapted_of(full))
    assert declared["exact-lossless"] == len(lossless.ways(full))
    assert declared["exact-logits"] == len(logits.KERNELS["every"])
    assert declared["exact-fp8"] == len(logits.KERNELS["fp8"])
    assert declared["exact-tests"] == len(exact.case_files(full)) + 1


def test_every_file_of_tests_for_devices_is_run() -> None:
    from benchmarks.cuda import exact
    from tests.shard.apart import KernelsApart

    assert hasattr(KernelsApart, exact.RUNS_THEM)
    for path in exact.TESTS.rglob("test_*.py"):
        if "(KernelsApart)" in path.read_text():
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    running = {str(path.relative_to(ROOT)) for kind in KernelsApart.__subclasses__() for path in kind.cases}
    assert set(exact.case_files(Setup())) == running and len(running) > 1


def test_shapes_of_attention_cover_every_kind_and_context() -> None:
    names = [step.name for step in shapes.steps(Setup())]
    assert len(set(names)) == len(names) == 15
    assert {name.split()[0] for name in names} == {"decode", "verification", "prefill"}
    assert all(f"decode {load} x 1 in {context}" in names for load in (1, 8, 64) for context in (1024, 8192, 32_768))
