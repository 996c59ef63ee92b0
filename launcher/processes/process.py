"""One child process: started so that it cannot outlive the launcher, asked to end, ended.

Knows signals and exit codes; not what the child does.
"""

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_TETHER = Path(__file__).with_name("tether.py")


def environment_of_children(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: the same code as this process's, whatever lies in the working directory."""
    # gRPC's own lines have another form than the log's, and come again with every attempt to connect
    environment = {"GRPC_VERBOSITY": "NONE"} | dict(base) | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    root = str(Path(__file__).parents[3])
    if root != sysconfig.get_path("purelib"):
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [base.get("PYTHONPATH")])])
    return environment


class Child:
    """`python -m MODULE ARGUMENT…` in a process group of its own: a terminal's Ctrl-C reaches the launcher alone.

    Both of its outputs go to `output`, or where this process's go.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Path | list[str],
        environment: Mapping[str, str],
        output: IO[bytes] | None = None,
        inherits: Sequence[int] = (),
    ) -> None:
        """`inherits`: open files that the child has under the same numbers."""
        self.name = name
        words = arguments if isinstance(arguments, list) else [str(arguments)]
        command = [sys.executable, "-m", module, *words]
        if sys.platform == "linux":
            command = [sys.executable, "-IS", str(_TETHER), str(os.getpid()), *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=dict(environment),
            process_group=0,
            pass_fds=inherits,
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

    def hand_over(self) -> None:
        """Ask a router to finish what it has, since another one takes what comes."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGUSR1)

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
