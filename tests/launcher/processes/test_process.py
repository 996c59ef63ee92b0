"""A child of the launcher: its start, and its end with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lorikeet.proto.process import environment_of_children, tethered
from tests.launcher.processes.test_supervisor import ENVIRONMENT, ROOT, gone

LAUNCHER = """
import json, os, sys, time
from pathlib import Path
from lorikeet.proto.children import Child

os.register_at_fork(after_in_child=os.abort)  # as a library with threads may do
config = Path(sys.argv[1])
config.write_text(json.dumps({"name": "child", "log": sys.argv[2]}))
child = Child("child", "tests.launcher.processes.stand_in", config, os.environ)
print(child.pid, flush=True)
while child.exit_code is None:
    time.sleep(0.02)
print(child.ending, flush=True)
"""


def started(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A launcher, and the process id of its child once that has started."""
    log = folder / "log"
    command = [sys.executable, "-c", LAUNCHER, str(folder / "config"), str(log)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    deadline = time.monotonic() + 60
    while not log.exists() and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return launcher, pid


def test_nothing_of_the_parent_runs_in_the_child(tmp_path: Path) -> None:
    launcher, pid = started(tmp_path)
    with launcher:
        assert (tmp_path / "log").read_text() == f"child started {pid}\n"
        os.kill(pid, signal.SIGTERM)
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "child ended with exit code 0\n"


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    launcher, pid = started(tmp_path)
    with launcher:
        launcher.kill()
    deadline = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pid)
    assert "SIGTERM" not in (tmp_path / "log").read_text()


def test_a_child_whose_parent_is_gone_does_not_start(tmp_path: Path) -> None:
    command = tethered(["/bin/echo", "started"], parent_pid=os.getppid())
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_cuda_memory_has_expandable_segments_unless_it_is_configured(
    environment: dict[str, str], setting: str | None
) -> None:
    assert environment_of_children(environment).get("PYTORCH_ALLOC_CONF") == setting
