"""What results/proof.json claims follows from its own raw values; and how a run is resumed, written and refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import history, proof, readme
from benchmarks.bars import BARS, NOT_REACHED, PARTS
from benchmarks.case import Bar, Case, Part, verdict

ENTRIES: list[dict[str, Any]] = json.loads(proof.RESULTS.read_text()) if proof.RESULTS.exists() else []
DECLARED = {bar.name: bar for bar in BARS}


def recomputed(told: dict[str, Any], bar: Bar) -> tuple[str, list[float] | None]:
    """Validation and figure of an entry from nothing but its raw values."""
    cases = [Case(case["case"], case["raw"], case["error"]) for case in told["cases"]]
    failed = any(case.error for case in cases) or len(cases) != bar.num_cases
    part = next(part for part in PARTS if part.name == bar.part)
    void = "" if failed else part.void([case.raw for case in cases])
    state, measured = verdict(bar, cases, void)
    if measured is None:
        return state, None
    return state, [round(value, 6) for value in (measured.median, measured.low, measured.high)]


@pytest.mark.parametrize("told", ENTRIES, ids=lambda told: f"{told['bar']} at {told['began']}")
def test_an_entry_says_what_its_raw_values_say(told: dict[str, Any]) -> None:
    """CachedAdapter to what was wanted when it was measured; failed and missed runs stay and are told as such."""
    bar = replace(DECLARED[told["bar"]], wanted=told["wanted"], num_cases=max(told["num_cases"], 1))
    if told["verdict"] == "failed":
        bar = replace(bar, num_cases=DECLARED[told["bar"]].num_cases)
    state, figures = recomputed(told, bar)
    assert state == told["verdict"]
    assert told["num_cases"] == len(told["cases"])
    if figures is not None:
        assert figures == [told["measured"], *told["spread"]]


@pytest.mark.parametrize("told", list(proof.latest(ENTRIES).values()), ids=lambda told: str(told["bar"]))
def test_the_newest_entry_of_a_bar_reaches_it_or_is_known_to_miss(told: dict[str, Any]) -> None:
    bar = DECLARED[told["bar"]]
    state, figures = recomputed(told, bar)
    wanted = "missed" if bar.name in NOT_REACHED else "holds"
    assert state == wanted, f"{figures} where {bar.wanted} was wanted"
    assert len({case["case"] for case in told["cases"]}) == bar.num_cases


@pytest.mark.parametrize("name", history.READMES)
def test_readmes_show_the_newest_figures(name: str) -> None:
    text = (history.REPOSITORY / name).read_text()
    assert readme.shown(name, text, ENTRIES) == text, "run python -m benchmarks.readme"


def test_bars_and_parts_belong_together() -> None:
    names = [bar.name for bar in BARS]
    assert len(set(names)) == len(names)
    assert {bar.part for bar in BARS} == {part.name for part in PARTS}
    assert NOT_REACHED.keys() <= set(names)
    for part in PARTS:
        assert len({bar.num_cases for bar in proof.bars_of(part)}) == 1


def test_declared_numbers_of_cases_are_those_that_exist() -> None:
    from benchmarks import adapters_exact, clients, exactness
    from tests import tiny
    from tests.router.api.routes import test_lorax_client
    from tests.shard.sampling import test_distribution as test_law

    named = [name for name in vars(test_lorax_client) if name.startswith("test_")]
    assert len(named) == clients.NUM_TESTS
    assert len(tiny.VARIANTS) == exactness.NUM_ARCHITECTURES
    assert len(test_law.CASES) == exactness.NUM_DISTRIBUTIONS
    assert len(adapters_exact.ARCHITECTURES) == exactness.NUM_ADAPTED


class Measured:
    """A part of four cases that notes what it was asked for and breaks where told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.breaks_at = -1
        self.made: list[str] = []
        self.closed = 0
        self.part = Part("made up", self.measure, {"length": 3})
        self.bar = Bar("made up bar", "made up", 4, lambda raw: float(raw["x"]), 1.0)
        monkeypatch.setattr(proof, "BARS", (self.bar,))
        monkeypatch.setattr(proof, "RESULTS", folder / "results" / "proof.json")
        monkeypatch.setattr(proof, "RUNS", folder / "runs")
        monkeypatch.setattr(history, "head", lambda: "c" * 40)

    def measure(self, finished: frozenset[str]) -> Iterator[Case]:
        try:
            for number in range(4):
                if number == self.breaks_at:
                    raise RuntimeError("the server ended")
                if f"round {number}" not in finished:
                    self.made.append(f"round {number}")
                    yield Case(f"round {number}", {"x": 2.0 + number / 10})
        finally:
            self.closed += 1

    def entries(self) -> list[dict[str, Any]]:
        return json.loads(proof.RESULTS.read_text()) if proof.RESULTS.exists() else []


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    return Measured(monkeypatch, tmp_path)


def test_a_run_is_written_whole(made_up: Measured) -> None:
    assert proof.run(made_up.part, 100)
    (told,) = made_up.entries()
    assert (told["verdict"], told["num_cases"], told["measured"]) == ("holds", 4, 2.15)
    assert [case["value"] for case in told["cases"]] == [2.0, 2.1, 2.2, 2.3]
    assert told["commit"] == "c" * 40


def test_an_interrupted_run_goes_on_where_it_stopped(made_up: Measured) -> None:
    assert not proof.run(made_up.part, 0.0)
    assert made_up.made == ["round 0"]
    assert made_up.closed == 1, "what a part started must end with it"
    assert made_up.entries() == []
    assert proof.run(made_up.part, 100)
    assert made_up.made == [f"round {number}" for number in range(4)]
    assert made_up.entries()[0]["num_cases"] == 4


def test_other_settings_start_anew(made_up: Measured) -> None:
    proof.run(made_up.part, 0.0)
    assert proof.run(replace(made_up.part, settings={"length": 4}), 100)
    assert made_up.made == ["round 0", *(f"round {number}" for number in range(4))]


def test_a_broken_run_stays_in_the_file(made_up: Measured) -> None:
    made_up.breaks_at = 2
    assert proof.run(made_up.part, 100)
    made_up.breaks_at = -1
    assert proof.run(made_up.part, 100)
    broken, whole = made_up.entries()
    assert (broken["verdict"], broken["measured"]) == ("failed", None)
    assert "the server ended" in broken["reason"]
    assert whole["verdict"] == "holds"


def test_standing_asks_for_the_same_code_and_no_changes(made_up: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "changed", list)
    proof.run(made_up.part, 100)
    entries = made_up.entries()
    assert proof.standing(entries, "c" * 40) == {"made up bar": ""}
    assert "differs" in proof.standing(entries, history.git("rev-parse", "HEAD").strip())["made up bar"]
    assert (
        "uncommitted"
        in proof.standing([{**entries[0], "changed": ["shard/engine/engine.py"]}], "c" * 40)["made up bar"]
    )
    assert proof.standing([], "c" * 40) == {"made up bar": "never measured"}
    assert "missed" in proof.standing([entries[0], {**entries[0], "verdict": "missed"}], "c" * 40)["made up bar"]
