"""Appending lines to a file: earlier content stays, a torn line is ended, and a moved file is reopened."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lorikeet.router.usage_log import Unwritten, UsageFile
from tests.router.usage_log.test_writer import RECORD, named


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Simulates a full disk: one write is partial, the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    for name in ("first", "second"):
        file = UsageFile(str(path))
        file.write(named(name))
        file.close()
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["first", "second"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_line_does_not_damage_others(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    file = UsageFile(str(path))
    file.write(named("whole"))
    length = path.stat().st_size
    with no_file_above(length + 100):
        with pytest.raises(Unwritten, match="only a part of a line was written"):
            file.write(named("torn"))
        for _ in range(2):
            with pytest.raises(Unwritten, match="File too large"):
                file.write(named("lost"))
    file.write(named("later"))
    file.write(RECORD)
    first, torn, later, last = path.read_text().splitlines()
    assert [json.loads(line)["request_id"] for line in (first, later, last)] == ["whole", "later", "a"]
    assert len(torn) == 100


def test_a_moved_file_is_left_alone_after_reopen(tmp_path: Path) -> None:
    path, moved = tmp_path / "usage.jsonl", tmp_path / "usage.jsonl.1"
    file = UsageFile(str(path))
    file.write(named("1"))
    path.rename(moved)
    file.write(named("2"))
    file.reopen()
    file.write(named("3"))
    assert [json.loads(line)["request_id"] for line in moved.read_text().splitlines()] == ["1", "2"]
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["3"]


def test_where_a_new_file_cannot_be_opened_the_old_one_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = UsageFile(str(folder / "usage.jsonl"))
    folder.rename(tmp_path / "gone")
    with pytest.raises(Unwritten, match="cannot be opened again: No such file"):
        file.reopen()
    file.write(named("1"))
    assert "1" in (tmp_path / "gone" / "usage.jsonl").read_text()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unwritten):
        file.reopen()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"--usage-log .*/nowhere/usage\.jsonl cannot be opened: No such file"):
        UsageFile(str(tmp_path / "nowhere" / "usage.jsonl"))
