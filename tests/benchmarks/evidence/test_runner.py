"""Running suites: one that fails stops no other, and the exit code says so."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.evidence import runner


def test_one_failing_group_stops_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"bandwidth": -11, "start": None, "decode": 3, "swap": 0}
    asked: list[str] = []

    def exit_code(words: list[str], *_: object) -> int | None:
        asked.append(words[0])
        return ended[words[0]]

    monkeypatch.setattr(runner, "exit_code", exit_code)
    assert runner.run_apart({name: [name] for name in ended}, {}, 600.0) == runner.FAILED
    assert asked == list(ended)
    assert capsys.readouterr().out.splitlines()[-1] == "bandwidth FAILED; start FAILED; decode missed; swap holds"
    assert runner.run_apart({"decode": ["decode"], "swap": ["swap"]}, {}, None) == runner.MISSED
    assert runner.run_apart({"swap": ["swap"]}, {}, None) == runner.HOLDS


def test_nothing_that_a_process_started_is_left(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys; "
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"pathlib.Path({str(note)!r}).write_text(str(left.pid)); raise SystemExit(3)"
    )
    assert runner.exit_code([sys.executable, "-c", code], {}, 300.0) == 3
    for _ in range(1000):
        if not is_running(int(note.read_text())):
            break
        time.sleep(0.01)
    else:
        raise AssertionError("it runs on")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty where it has ended and nobody has asked
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_takes_too_long_is_ended() -> None:
    assert runner.exit_code([sys.executable, "-c", "import time; time.sleep(600)"], {}, 0.1) is None
