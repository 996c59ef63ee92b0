"""Files of results: from the first case on, and what counts as finished."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import history
from benchmarks.case import Bar, Case, Part, raw_value
from benchmarks.cuda import record
from benchmarks.cuda.record import Commit, Recording, is_finished
from benchmarks.proof import bars_of

PART = Part("decode-floor", lambda finished: iter(()), {"loads": (1, 2)})  # type: ignore[arg-type, return-value]
BARS = [
    Bar("share", PART.name, 2, partial(raw_value, "x"), 0.5),
    Bar("told", PART.name, 2, partial(raw_value, "x"), None),
]
COMMIT = Commit("c0ffee")


def recorded(folder: Path, values: Sequence[float], began: str = "now", changed: Sequence[str] = ()) -> Recording:
    facts = {"commit": COMMIT.name, "changed": list(changed), "machine": {}, "versions": {}}
    cases = [Case(f"round {number}", {"x": value}) for number, value in enumerate(values)]
    return Recording(PART, BARS, folder, facts, began, cases)


def finished(folder: Path, commit: Commit = COMMIT) -> bool:
    settings: dict[str, Any] = record.as_read(PART.settings)
    return is_finished(BARS, record.read(folder / "decode.json"), commit, settings)


def test_an_entry_has_the_shape_of_the_proof(tmp_path: Path) -> None:
    told = recorded(tmp_path, [0.7, 0.9]).write(is_whole=True)
    proof = json.loads((history.REPOSITORY / "benchmarks/results/proof.json").read_text())
    assert list(told[0]) == list(proof[-1])
    assert told[0]["verdict"] == "holds" and told[0]["measured"] == 0.8
    assert bars_of(PART) == []  # the proof knows nothing of it


def test_a_run_replaces_what_it_wrote_and_keeps_all_else(tmp_path: Path) -> None:
    recorded(tmp_path, [0.4, 0.4], "yesterday").write(is_whole=True)
    recorded(tmp_path, [0.6]).write(is_whole=False)
    told = record.read(tmp_path / "decode.json")
    assert [each["reason"] for each in told] == ["", "", record.UNFINISHED, record.UNFINISHED]
    assert told[2]["cases"][0]["raw"] == {"x": 0.6}
    assert not finished(tmp_path)
    recorded(tmp_path, [0.6, 0.6]).write(is_whole=True)
    told = record.read(tmp_path / "decode.json")
    assert [each["verdict"] for each in told] == ["missed", "holds", "holds", "holds"]
    assert finished(tmp_path)


def test_what_was_measured_otherwise_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path, [0.6, 0.6]).write(is_whole=True)
    assert finished(tmp_path)
    assert not finished(tmp_path, Commit("c0ffee", ["shard/engine/engine.py"]))
    monkeypatch.setattr(history, "same_code", lambda old, new: False)
    assert not finished(tmp_path, Commit("decaf"))


def test_a_part_that_had_failed_is_not_finished(tmp_path: Path) -> None:
    failed = recorded(tmp_path, [0.6])
    failed.cases.append(Case("broken", {}, "out of memory"))
    assert failed.write(is_whole=True)[0]["verdict"] == "failed"
    assert not finished(tmp_path)


def test_a_copy_without_a_repository_must_be_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(history, "head", missing)
    with pytest.raises(ValueError, match="--commit"):
        Commit.of_tree()
    assert Commit.of_tree("c0ffee") == COMMIT
