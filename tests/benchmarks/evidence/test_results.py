"""Results: small files, an archive with raw cases, what is out of date; and the pages that show them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import figures, proof, report
from benchmarks.evidence import results, runner
from benchmarks.evidence.figure import Case, Figure, Suite, raw_value
from benchmarks.evidence.results import REPOSITORY

SHARED = {"commit": "c0ffee", "changed": [], "date": "2026-01-02T03:04:05+00:00", "machine": {}, "versions": {}}
MOST_BYTES = 300_000
MACHINE = {"processor": "a processor", "cores": 2, "memory_mib": 2048}


class Measured:
    """A suite of four cases, which may break."""

    def __init__(self, folder: Path) -> None:
        self.breaks_at = -1
        self.num_closed = 0
        self.folder = folder
        figure = Figure("made up", partial(raw_value, "x"), 1.0)
        self.suite = Suite("suite", self.measure, 4, (figure,), "a model", "float32")  # type: ignore[arg-type]

    def measure(self) -> Iterator[Case]:
        try:
            for number in range(4):
                if number == self.breaks_at:
                    raise RuntimeError("the server ended")
                yield Case(f"round {number}", {"x": 2.0 + number / 10})
        finally:
            self.num_closed += 1

    def run(self) -> int:
        return runner.run(self.suite, SHARED, self.folder)

    def latest(self) -> results.Result:
        return results.latest(self.folder)["made up"]


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    return Measured(tmp_path)


def test_a_run_is_written_small_and_archived_with_its_cases(measured: Measured) -> None:
    assert measured.run() == runner.HOLDS
    latest = measured.latest()
    assert (latest["status"], latest["rounds"], latest["median"], latest["commit"]) == ("holds", 4, 2.15, "c0ffee")
    assert "cases" not in latest
    row, cases = results.archived(measured.folder)
    assert row == latest
    assert [case["raw"]["x"] for case in cases["cases"]] == [2.0, 2.1, 2.2, 2.3]


def test_a_broken_run_is_a_result_and_stays_in_the_archive(measured: Measured) -> None:
    measured.breaks_at = 2
    assert measured.run() == runner.FAILED
    assert (measured.latest()["status"], measured.num_closed) == ("failed", 1)
    assert "the server ended" in measured.latest()["reason"]
    measured.breaks_at = -1
    assert measured.run() == runner.HOLDS
    states = [row["status"] for row in results.archived(measured.folder) if "figure" in row]
    assert states == ["failed", "holds"]


def test_a_trial_writes_nothing(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run(measured.suite, SHARED, None) == runner.HOLDS
    assert "made up: 2.15" in capsys.readouterr().out
    assert not list(measured.folder.iterdir())


def test_a_void_run_is_archived_alone(measured: Measured) -> None:
    measured.run()
    measured.suite = replace(measured.suite, void=lambda raws: "the machine was busy")
    measured.run()
    assert measured.latest()["status"] == "holds"
    states = [row["status"] for row in results.archived(measured.folder) if "figure" in row]
    assert states == ["holds", "void"]


def test_settings_do_not_depend_on_the_folder_of_the_checkout() -> None:
    for suite in figures.SUITES:
        assert str(REPOSITORY) not in json.dumps(suite.settings), suite.name


def test_changed_files_are_stated_and_results_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("benchmarks/results/a.json", "shard/b.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("1")
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "First")):
        results.git(*arguments)
    assert results.facts()["changed"] == []
    for path in ("benchmarks/results/a.json", "shard/b.py"):
        (tmp_path / path).write_text("2")
    assert results.facts()["changed"] == ["shard/b.py"]


def test_settings_are_the_constants_of_the_module(measured: Measured) -> None:
    assert measured.suite.settings["most_bytes"] == MOST_BYTES
    assert "measured" not in measured.suite.settings


def test_long_lists_of_samples_are_archived_as_percentiles() -> None:
    other = {"few": [2, 1], "events": [[1, 2]] * 2000, "number": 1.5}
    pauses = {"count": 2000, "p50": 999, "p90": 1799, "p99": 1979, "p100": 1999}
    assert results.summarized({**other, "deep": {"pauses": list(range(2000))}}) == {**other, "deep": {"pauses": pauses}}


def test_current_results_are_small_and_belong_to_figures() -> None:
    files = list(results.RESULTS.rglob("*"))
    assert sum(path.stat().st_size for path in files if path.is_file()) <= MOST_BYTES
    declared = {figure.name for suite in figures.SUITES for figure in suite.figures}
    assert results.latest().keys() <= declared
    assert {path.name for path in files if path.suffix == ".json"} == {
        f"{results.slug(name)}.json" for name in results.latest()
    }


def test_figures_have_different_files() -> None:
    names = [figure.name for suite in figures.SUITES for figure in suite.figures]
    assert len({results.slug(name) for name in names}) == len(names)


def test_the_archive_keeps_every_miss_and_void_run() -> None:
    rows = [row for row in results.archived() if "bar" in row]
    states = [row["state"] for row in rows]
    assert (len(rows), states.count("missed"), states.count("void"), states.count("failed")) == (319, 16, 14, 6)


def test_suites_are_listed_with_their_durations_and_dates(measured: Measured) -> None:
    assert proof.listed([measured.suite], {}) == "suite\n    made up: never measured"
    measured.run()
    known = results.latest(measured.folder)
    assert proof.listed([measured.suite], known) == "suite (0 s)\n    made up: holds, 2026-01-02"


def test_nothing_is_measured_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert proof.main([]) == 0
    assert re.search(r"^closed-8 \(\d+ s\)$", capsys.readouterr().out, re.MULTILINE)


def test_pages_show_the_latest_results() -> None:
    known = report.latest()
    pages = {report.PAGE: report.page(known), report.README: ""}
    readme = report.README.read_text()
    pages[report.README] = report.readme(readme, known)
    for path, text in pages.items():
        assert path.read_text() == text, f"{path.relative_to(REPOSITORY)}: python -m benchmarks.report"


def test_readme_shows_ten_figures_at_most_and_the_page_misses_first() -> None:
    assert len(report.SHOWN) <= 10
    assert set(report.SHOWN) <= results.latest().keys()
    page = report.page(report.latest())
    assert page.index("## Missed") < page.index("## All others")


def test_a_result_is_held_against_the_target_of_today(measured: Measured) -> None:
    measured.run()
    [figure] = measured.suite.figures
    result = measured.latest()
    assert report.judged(result, figure)["status"] == "holds"
    higher = report.judged(result, replace(figure, target=2.2))
    assert (higher["status"], higher["target"]) == ("missed", 2.2)
    assert report.judged({**result, "status": "failed"}, figure)["status"] == "failed"


def test_a_figure_is_shown_with_where_and_when_it_was_measured(measured: Measured) -> None:
    measured.run()
    result = {**measured.latest(), "machine": MACHINE}
    letters = report.machines([result])
    text = " | ".join(report.cells(result, letters))
    assert text == "made up | 2.15 | 2 – 2.3 | ≥ 1 | holds | a model, float32 | – | A | 2026-01-02 | `c0ffee`"
    assert report.legend(letters) == "- Machine A: a processor, 2 cores, 2 GiB\n"


@pytest.mark.parametrize(("breaks_at", "status"), [(-1, "measured"), (2, "failed")])
def test_a_figure_without_a_target_is_measured_or_failed(measured: Measured, breaks_at: int, status: str) -> None:
    measured.breaks_at = breaks_at
    measured.run()
    result = {**measured.latest(), "machine": MACHINE, "target": None}
    assert report.cells(result, report.machines([result]))[4] == status


def test_readme_needs_its_markers() -> None:
    with pytest.raises(ValueError, match="README needs"):
        report.readme("no markers", {})


@pytest.mark.parametrize(
    ("value", "shown"), [(0.72, "0.72"), (43211.7, "43212"), (2.8e-8, "2.8e-08"), (0.0, "0"), (None, "–"), (12.0, "12")]
)
def test_numbers_are_short(value: float | None, shown: str) -> None:
    assert report.number(value) == shown


def test_the_archive_is_json_lines(measured: Measured) -> None:
    results.archive([{"a": 1}], measured.folder)
    results.archive([{"b": 2}], measured.folder)
    assert [json.dumps(row) for row in results.archived(measured.folder)] == ['{"a": 1}', '{"b": 2}']
