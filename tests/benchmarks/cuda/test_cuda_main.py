"""Running parts: one that fails stops no other, and the exit code says so."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.cuda import __main__ as command
from benchmarks.cuda.setup import SMOKE


def test_one_failing_group_stops_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"bandwidth": -11, "decode-floor": 3, "swap": 0}
    asked: list[str] = []

    def run(words: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        name = words[words.index("--part") + 1]
        asked.append(name)
        if name == "start":
            raise subprocess.TimeoutExpired(words, 590)
        return subprocess.CompletedProcess(words, ended[name])

    monkeypatch.setattr(subprocess, "run", run)
    groups = {"bandwidth": ["bandwidth"], "start": ["start"], "decode": ["decode-floor"], "swap": ["swap"]}
    assert command.run_apart(groups, [], SMOKE) == command.FAILED
    assert asked == ["bandwidth", "start", "decode-floor", "swap"]
    assert capsys.readouterr().out.splitlines()[-1] == "bandwidth FAILED; start FAILED; decode missed; swap holds"
    assert command.run_apart({"decode": ["decode-floor"], "swap": ["swap"]}, [], SMOKE) == command.MISSED
    assert command.run_apart({"swap": ["swap"]}, [], SMOKE) == command.HOLDS


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--smoke", "--part", "decoding"])
    assert "no part called decoding" in capsys.readouterr().err


def test_without_a_device_only_smoke_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_has_device", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path)])
