"""One child process: started so that it cannot outlive the launcher, asked to end, ended.

Knows signals and exit codes; not what the child does.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_TETHER = Path(__file__).with_name("tether.py")


class Child:
    """`python -m MODULE CONFIG` in a process group of its own: a terminal's Ctrl-C reaches the launcher alone."""

    def __init__(self, name: str, module: str, config: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        command = [sys.executable, "-m", module, str(config)]
        if sys.platform == "linux":
            command = [sys.executable, "-IS", str(_TETHER), str(os.getpid()), *command]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=dict(environment), process_group=0)

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
