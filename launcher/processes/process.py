"""One child process, which cannot outlive the launcher: starting it, signalling it, its exit code."""

import contextlib
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
    """The environment of a child: it imports the same code as this process, whatever the working directory holds."""
    # gRPC's own log lines have another format, and are repeated with every attempt to connect
    environment = {"GRPC_VERBOSITY": "NONE"} | dict(base) | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if "PYTORCH_CUDA_ALLOC_CONF" not in base:  # torch's older name for the same
        # joined weights leave holes in CUDA memory, which only such segments give back
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    root = str(Path(__file__).parents[3])
    if root != sysconfig.get_path("purelib"):
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [base.get("PYTHONPATH")])])
    return environment


class Child:
    """`python -m MODULE ARGUMENT…` in a new process group, so that a terminal's Ctrl-C reaches the launcher only.

    Standard output and error go to `output`, or to those of this process.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Path | list[str],
        environment: Mapping[str, str],
        output: IO[bytes] | None = None,
        inherits: Sequence[int] = (),
        standard_input: bytes = b"",
        failure_file: Path | None = None,
    ) -> None:
        """`inherits`: file descriptors that stay open in the child; `failure_file`: where it leaves why it fails."""
        self.name = name
        self._failure_file = failure_file
        if failure_file is not None:
            failure_file.unlink(missing_ok=True)
        words = arguments if isinstance(arguments, list) else [str(arguments)]
        command = [sys.executable, "-m", module, *words]
        if sys.platform == "linux":
            command = [sys.executable, "-IS", str(_TETHER), str(os.getpid()), *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if standard_input else subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=dict(environment),
            process_group=0,
            pass_fds=inherits,
        )
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has exited, which the supervisor sees
                self._process.stdin.write(standard_input)
                self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal, as in subprocess."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """How it exited, for a log line."""
        code = self.exit_code
        if code is None:
            return f"{self.name} is running"
        if code < 0:
            return f"{self.name} was ended by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}" + (f" ({self.reason})" if self.reason else "")

    @property
    def reason(self) -> str:
        """Why it failed, in its own words; empty if it did not say."""
        try:
            return "" if self._failure_file is None else self._failure_file.read_text()
        except FileNotFoundError:
            return ""

    def terminate(self) -> None:
        """Ask it to exit."""
        self._send(signal.SIGTERM)

    def reload(self) -> None:
        """Ask a router to reload its files."""
        self._send(signal.SIGHUP)

    def hand_over(self) -> None:
        """Ask a router to finish its requests and accept no new connections."""
        self._send(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill it and the other processes of its group, even after its own exit."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def wait(self, seconds: float) -> bool:
        """Whether it exits within `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _send(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            self._process.send_signal(number)
