"""`make gpu-check` outlives what it tests: checks that fail, crash or hang, and says so in one table."""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.cuda.check import __main__ as command
from benchmarks.cuda.check import rows as kept
from benchmarks.cuda.check.pack import INCLUDED, needed, pack_kernels
from benchmarks.cuda.check.rows import Row, Rows, read, table
from benchmarks.cuda.check.stages import BOTH, STAGES, USUAL
from tests.shard.apart import KernelsApart

CHOOSES = "DEVICE"
"""In the text of kernels' tests that run on CUDA if they are not interpreted."""

THREE_CHECKS = """
import sys
from pathlib import Path
from benchmarks.cuda.check.rows import Rows
rows = Rows(Path(sys.argv[1]), "kernels", frozenset(sys.argv[2:]))
rows.check("start", lambda: {}, is_needed=True)
for name in "abc":
    rows.check(name, lambda: {"us": 1.0})
"""


class ThreeChecks(command.Run):
    """A run whose stages are one with three checks."""

    def command(self, stage: str, done: Sequence[str] = ()) -> list[str]:
        return [sys.executable, "-c", THREE_CHECKS, str(self.out), *done]


def states(folder: Path) -> list[tuple[str, bool, str]]:
    return [(row["name"], row["ok"], row.get("error", "")) for row in read(folder)]


def test_a_stage_begins_again_behind_the_check_that_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.BREAK, "b")
    ThreeChecks(tmp_path).stage("kernels", 60)
    assert states(tmp_path)[0] == ("start", True, "")
    assert states(tmp_path)[1:] == [("a", True, ""), ("b", False, "ended with exit code 75"), ("c", True, "")]


def test_a_stage_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.HANG, "b")
    monkeypatch.setattr(command, "LEAST_S", 5.0)
    ThreeChecks(tmp_path).stage("kernels", 5)
    assert states(tmp_path)[0] == ("start", True, "")
    assert states(tmp_path)[1:] == [("a", True, ""), ("b", False, "did not end in time")]


def test_a_stage_that_does_not_start_is_a_row(tmp_path: Path) -> None:
    class Broken(command.Run):
        def command(self, stage: str, done: Sequence[str] = ()) -> list[str]:
            return [sys.executable, "-c", "raise SystemExit(3)"]

    Broken(tmp_path).stage("kernels", 60)
    assert states(tmp_path) == [("start", False, "ended with exit code 3")]


def test_stages_without_time_are_rows(tmp_path: Path) -> None:
    command.run_all(ThreeChecks(tmp_path), ["kernels", "large"], 0)
    assert [row["name"] for row in read(tmp_path)] == ["not begun"] * 2
    command.run_both(ThreeChecks(tmp_path), ThreeChecks(tmp_path), ["large"], 0)
    assert len(read(tmp_path)) == 4


def test_a_check_that_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    rows = Rows(tmp_path, "kernels", frozenset({"done"}))

    def fail() -> Row:
        raise ValueError("too large\nand more")

    assert not rows.check("wrong", fail) and not rows.check("done", fail) and rows.check("right", lambda: {"us": 2.0})
    wrong, right = read(tmp_path)
    assert wrong["error"] == "ValueError: too large" and right["us"] == 2.0


def test_the_table_is_short_and_begins_with_what_is_wrong() -> None:
    rows = [{"stage": "kernels", "name": f"check {number}", "us": float(number)} for number in range(900)]
    rows[250] |= {"ok": False, "error": "E" * 400}
    text = table("head", rows)
    lines = text.splitlines()
    assert len(text) <= kept.MOST_CHARACTERS and lines[:2] == ["head", "900 rows, 1 not ok"]
    assert lines[2].startswith("NOT OK kernels | check 250 | EEE") and "more rows" in lines[-1]
    assert lines[3:5] == ["kernels:", "  check 0: us=0"]


def test_rows_are_compared_by_their_first_value() -> None:
    decode = {"stage": "large", "name": "decode 1"}
    old = [{**decode, "ms": 4.0, "tok_s": 250.0}, {"stage": "peer", "name": "x", "tok_s": 5}]
    new = [{**decode, "ms": 3.0, "tok_s": 333.0}, {"stage": "peer", "name": "y", "tok_s": 5}]
    text = table("head", new, old)
    assert text.count("| ms 0.75x") == 1 and " | " not in text.splitlines()[-1]
    assert kept.ratio(new[0] | {"ms": 4, "ok": False}, old[0]) == " | ms 1.00x"


def test_usual_stages_fit_into_eight_minutes_and_their_order_is_that_of_all() -> None:
    assert [name for name in STAGES if name in USUAL] == list(USUAL) and set(BOTH) <= set(STAGES)
    assert all(STAGES[name].limit_s <= 160 for name in USUAL)


def test_another_tree_s_product_is_measured_by_this_tree_s_checks(tmp_path: Path) -> None:
    other = command.Run(tmp_path, product=tmp_path / "older").environment()["PYTHONPATH"].split(":")
    assert other[:2] == [str(tmp_path / "older" / "src"), str(command.ROOT)]
    for flag in ("--beside", "--compare"):
        with pytest.raises(SystemExit):
            command.main([flag, str(tmp_path / "older"), "--out", str(tmp_path)])


def test_a_card_lacks_what_comes_without_torch() -> None:
    versions = needed()
    assert {"grpcio", "pydantic-core", "llguidance", "structlog"} <= set(versions) and not set(versions) & INCLUDED


def test_only_compiled_kernels_are_packed(tmp_path: Path) -> None:
    import tarfile

    folder = tmp_path / "cache" / "hash"
    folder.mkdir(parents=True)
    for name in ("kernel.cubin", "kernel.json", "kernel.ptx"):
        (folder / name).write_text("x")
    pack_kernels(tmp_path / "cache", tmp_path / "kernels.tar.xz")
    with tarfile.open(tmp_path / "kernels.tar.xz") as packed:
        assert sorted(packed.getnames()) == ["hash/kernel.cubin", "hash/kernel.json"]


def test_the_smallest_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--smoke", "--only", "ceilings", "--out", str(tmp_path)]) == 0
    assert "0 not ok" in capsys.readouterr().out
    card = read(tmp_path)[0]
    assert card["stage"] == "ceilings" and card["copy_gbs"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "table.txt"]


def test_every_file_of_tests_for_devices_is_run() -> None:
    found = {path for path in (command.ROOT / "tests").rglob("*_cases.py") if CHOOSES in path.read_text()}
    for path in (command.ROOT / "tests").rglob("test_*.py"):
        if "(KernelsApart)" in path.read_text():
            import_module(".".join(path.relative_to(command.ROOT).with_suffix("").parts))
    running = {path for kind in KernelsApart.__subclasses__() for path in kind.cases}
    by_test_graphs = ("graphs_triton_cases.py", "kinds_triton_cases.py")
    running |= {command.ROOT / "tests/shard/model" / name for name in by_test_graphs}
    assert found == running and len(running) > 1


@pytest.mark.device
def test_every_usual_stage(tmp_path: Path) -> None:
    assert command.main(["--smoke", "--out", str(tmp_path)]) == 0, (tmp_path / "table.txt").read_text()
    assert {row["stage"] for row in read(tmp_path)} == set(USUAL) and len(list(tmp_path.iterdir())) <= 8


@pytest.mark.device
@pytest.mark.parametrize("name", sorted(STAGES.keys() - set(USUAL)))
def test_every_other_stage(name: str, tmp_path: Path) -> None:
    assert command.main(["--smoke", "--only", name, "--out", str(tmp_path)]) == 0, (tmp_path / "table.txt").read_text()


@pytest.mark.device
def test_a_crash_and_a_hang_are_outlived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.BREAK, "rms_norm")
    monkeypatch.setenv(kept.HANG, "PEFT generate, one adapter")
    monkeypatch.setattr(command, "SLOW", 2)
    code = command.main(["--smoke", "--only", "kernels", "peer", "large", "--budget", "400", "--out", str(tmp_path)])
    failed = {row["name"]: row["error"] for row in read(tmp_path) if not row.get("ok", True)}
    assert code == 1 and failed.keys() == {"rms_norm", "PEFT generate, one adapter"}
    names = [row["name"] for row in read(tmp_path)]
    assert "gate" in names and "decode 1" in names and names.count("add_rms_norm") == 1


@pytest.mark.device
def test_two_trees_by_turns(tmp_path: Path) -> None:
    options = ["--smoke", "--only", "sampling", "--out", str(tmp_path)]
    assert command.main([*options, "--beside", str(command.ROOT)]) == 0
    here, other = read(tmp_path), read(tmp_path / "other")
    assert [row["name"] for row in here] == [row["name"] for row in other] == ["greedy", "top-k, penalties"]
    assert (tmp_path / "table.txt").read_text().count("| us ") == 2
    earlier = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert earlier["us"] > 0
