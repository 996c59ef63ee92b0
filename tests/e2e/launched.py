"""A launcher and its children as real processes: started, read line by line, ended."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lorikeet.proto.preload import is_possible
from lorikeet.proto.process import free_port, python, tethered
from tests.forked import Started

__all__ = ["ROOT", "Launched", "alive", "free_port"]

ROOT = Path(__file__).parents[2]
START_S = 180.0
END_S = 60.0
DEFECTS = ("unhandled_exception", "output_parser_failed")
"""Log events of defects, which no request may cause."""


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # tests that run under nohup: their children must not inherit that
    signal.signal(signal.SIGHUP, lambda *_: None)


FORKING = ("lorikeet.proto.preload", "lorikeet.adapters.loader.workers")


def command(pid: int) -> str:
    """The command of a process, whose words end with a zero; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Launched:
    """`lorikeet-launcher` on a free loopback port."""

    def __init__(
        self,
        *arguments: str,
        port: int | None = None,
        under: Sequence[str] = (),
        is_forked: bool = True,
        **environment: str,
    ) -> None:
        """`under` is a command that executes the one after it; `is_forked`: from a process that has imported all."""
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "OMP_NUM_THREADS") if name in os.environ}
        offline = {"HF_HUB_OFFLINE": "1", "MODEL_ID": "lorikeet/base"}
        kept |= {"PYTHONPATH": str(ROOT / "src")} | offline | environment
        words = ("lorikeet.launcher", "--hostname", "127.0.0.1", "--port", str(self.port), *arguments)
        self._process: subprocess.Popen[bytes] | Started
        reading, writing = os.pipe()
        if is_forked and not under and is_possible():
            self._process = Started(*words, environment=kept, output=writing)
        else:
            command = [*under, *tethered(python(*words))]
            nothing = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, env=kept, stdin=nothing, stdout=writing, stderr=writing, process_group=0
            )
        os.close(writing)
        self._output = os.fdopen(reading)
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._seen: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in [self.pid, *self.all_children()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.wait()
        self._reader.join()
        defects = [line for line in self.lines if any(event in line for event in DEFECTS)]
        if error is None:
            assert not defects, "\n".join(defects)
        elif defects:
            error.add_note("\n".join(defects))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def children(self) -> list[int]:
        """Shards, loader and router that it has started and that still run; not what forks them, nor what they fork."""
        return [pid for pid in self.all_children() if not any(map(command(pid).__contains__, FORKING))]

    def all_children(self) -> list[int]:
        """All processes that it has started or adopted and that still run."""
        try:
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            text = ""
        self._seen |= {int(pid) for pid in text.split()}
        return sorted(pid for pid in self._seen if alive(pid))

    def child(self, module: str) -> int:
        """The child that runs `python -m module`."""
        (found,) = [
            pid for pid in self.children() if f"\0-m\0lorikeet.{module}\0" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        return found

    def shard(self, index: int) -> int:
        """The child that is the shard of that number."""
        name = f"/shard-{index}.json\0"
        (found,) = [pid for pid in self.children() if name in Path(f"/proc/{pid}/cmdline").read_text()]
        return found

    def wait_for(self, words: str, seconds: float = START_S) -> str:
        """The next line that contains `words`."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._arrived.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{words!r} was not printed within {seconds} s:\n{self.output}") from None
            assert line is not None, f"ended without {words!r}:\n{self.output}"
            if words in line:
                return line

    def wait_until_ready(self, num_shards: int = 1) -> Self:
        """With all of its shards: the first one makes a server ready, and on a busy machine others begin later."""
        self.wait_for("is ready at")
        end = time.monotonic() + START_S
        while len(self.children()) != 2 + num_shards:
            assert time.monotonic() < end, self.output
            time.sleep(0.05)
        return self

    def signal(self, number: int) -> None:
        self.children()
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Signal every process of the launcher's group, as a terminal does at Ctrl-C."""
        self.children()
        os.killpg(self.pid, number)

    def signal_all(self, number: int) -> None:
        """Signal every process of the server one by one, the launcher last, as a service manager may."""
        for pid in [*self.children(), self.pid]:
            os.kill(pid, number)

    def wait(self, seconds: float = END_S) -> int:
        """The exit code; every child has exited too by then."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output}") from None
        self.wait_until_childless()
        self._reader.join()
        return code

    def wait_until_childless(self, seconds: float = 15.0) -> None:
        end = time.monotonic() + seconds
        while self.children() and time.monotonic() < end:
            time.sleep(0.02)
        assert not self.children(), f"orphans: {self.children()}"

    def _read(self) -> None:
        with self._output as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))
                self._arrived.put(line.rstrip("\n"))
        self._arrived.put(None)
