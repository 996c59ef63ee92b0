"""One child process: started so that it cannot outlive the launcher, asked to end, ended.

Knows signals and exit codes; not what the child does.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Child:
    """`python -m MODULE CONFIG` in a process group of its own: a terminal's Ctrl-C reaches the launcher alone."""

    def __init__(self, name: str, module: str, config: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        parent = os.getpid()

        def before_exec() -> None:
            # Runs between fork and exec. The launcher has one thread, so nothing can hold a lock here.
            if _LIBC is not None:
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != parent:  # it died before the line above
                    os._exit(1)

        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(config)],
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            process_group=0,
            preexec_fn=before_exec,  # noqa: PLW1509  (no threads here: downloads run in a child of their own)
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal, as subprocess has it."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """How it ended, for a log line."""
        code = self.exit_code
        if code is None:
            return f"{self.name} is running"
        if code < 0:
            return f"{self.name} was ended by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}"

    def terminate(self) -> None:
        """Ask it to end."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def hang_up(self) -> None:
        """Ask it to read its files again."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """End it, and whatever it started in its group, even where it has ended itself."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
