"""Servers of tests: forked from one process per worker, which has imported what they need."""

import ctypes
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lorikeet.proto.preload import ForkedProcess, Preload

ROOT = Path(__file__).parents[1]
START_S = 280.0
"""To import everything takes 5 s of processor time, and minutes on a machine that is busy with much else."""

_started: list[tuple[Preload, Path]] = []


def _preload() -> Preload:
    """The process of this worker, started with the first server."""
    if not _started:
        folder = Path(tempfile.mkdtemp(prefix="lorikeet-tests-"))
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1"}
        _started.append((Preload(folder, ["tests.forking"], environment, ["scipy", "boto3", "triton"]), folder))
    return _started[0][0]


def end() -> None:
    """End the process, if there is one."""
    for preload, folder in _started:
        preload.end()
        shutil.rmtree(folder)
    _started.clear()


def _adopt(adopts: bool) -> None:
    """Whether this process adopts what its descendants leave: only while a server is forked, so that what a test
    leaves is not this process's.
    """
    ctypes.CDLL(None).prctl(36, int(adopts), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


class Started(ForkedProcess):
    """`python -m MODULE ARGUMENT…` as a child of this process, with the methods of subprocess.Popen."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str], output: int) -> None:
        """`output`: descriptor of standard output and error."""
        preload = _preload()
        _adopt(True)
        try:
            preload.start()
            words = [module, *arguments]
            super().__init__(preload.address, "tests.forked_server", words, environment, output, preload=preload)
            self.wait_until_forked(START_S)
        finally:
            _adopt(False)

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None:  # no other thread waits for it
            self._connection.close()
            if self._exited is not None:
                self._exited.close()
        return code

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)
