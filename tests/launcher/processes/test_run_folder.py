"""Folders of launchers that were killed are removed; no others."""

import signal
import subprocess
import sys
from pathlib import Path

from lorikeet.launcher.run import run_folder

WAITS = """
import sys
from lorikeet.launcher.run import run_folder
with run_folder(sys.argv[1], "run-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_only_folders_of_dead_launchers_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        others = Path(other.stdout.readline().strip())
        (others / "router.json").write_text("{}")
        for name in ("run-foreign", "other-1"):
            (tmp_path / name).mkdir()
        with run_folder(str(tmp_path), "run-") as own:
            assert others.exists() and own.stat().st_mode & 0o777 == 0o700
        assert not own.exists()
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert others.exists()
        with run_folder(str(tmp_path), "run-"):
            assert not others.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-1", "run-foreign"]
