"""Compiled code is loaded only from files and folders that nobody else may write."""

import subprocess
import sys
from pathlib import Path

import pytest

from lorikeet.shard.system import native

SOURCE = "int answer(void) { return 1; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    path = tmp_path / "own.c"
    path.write_text(SOURCE)
    return path


def answer(source: Path) -> int:
    """In a new process: a process loads a path once."""
    code = (
        "import sys; from pathlib import Path; from lorikeet.shard.system import native\n"
        "print(native.library(Path(sys.argv[1])).answer(), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, str(source)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stderr)


def plant(built: Path, mode: int) -> None:
    """Replace a library by another of the same name, which answers 2."""
    code = built.with_suffix(".c")
    code.write_text(SOURCE.replace("1", "2"))
    built.unlink()
    subprocess.run(["cc", "-shared", "-fPIC", str(code), "-o", str(built)], check=True)
    built.chmod(mode)


@pytest.mark.parametrize("mode", [0o722, pytest.param(0o770, marks=pytest.mark.long)])
def test_a_library_that_others_may_write_is_compiled_again(source: Path, tmp_path: Path, mode: int) -> None:
    assert answer(source) == 1
    (built,) = (tmp_path / "cache" / "lorikeet").glob("*.so")
    assert native.is_own(built)
    plant(built, mode)
    assert answer(source) == 1
    assert native.is_own(built)
    plant(built, 0o700)
    assert answer(source) == 2, "its own file is used"


@pytest.mark.parametrize("folder", ["cache/lorikeet", pytest.param("cache", marks=pytest.mark.long)])
def test_a_folder_that_others_may_write_is_not_used(source: Path, tmp_path: Path, folder: str) -> None:
    assert answer(source) == 1
    (built,) = (tmp_path / "cache" / "lorikeet").glob("*.so")
    plant(built, 0o700)
    (tmp_path / folder).chmod(0o777)
    assert answer(source) == 1


def test_a_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "cache" / "lorikeet").symlink_to(elsewhere)
    assert answer(source) == 1
    assert not list(elsewhere.iterdir())
