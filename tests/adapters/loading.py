"""A loader's process for tests, and a caller that uses its socket."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from lorikeet.proto.preload import is_possible
from lorikeet.proto.process import python
from tests.forked import Started

ROOT = Path(__file__).parents[2]


class Caller:
    """One connection. Answers come in any order."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(120)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rwb")
        self._number = 0
        self.answers: dict[int, dict[str, Any]] = {}
        self.order: list[int] = []
        """Call numbers of the answers as they came."""

    def ask(self, **body: Any) -> int:
        """Send a call; its number."""
        self._number += 1
        self._lines.write(json.dumps({"call": self._number, **body}).encode() + b"\n")
        self._lines.flush()
        return self._number

    def answer(self, call: int) -> dict[str, Any]:
        """Wait for the answer to a call."""
        while call not in self.answers:
            line = self._lines.readline()
            assert line, "the loader disconnected"
            answer = json.loads(line)
            self.answers[answer["call"]] = answer
            self.order.append(answer["call"])
        return self.answers[call]

    def call(self, **body: Any) -> dict[str, Any]:
        return self.answer(self.ask(**body))

    def raw(self, line: bytes) -> dict[str, Any]:
        """Send an invalid line."""
        self._lines.write(line + b"\n")
        self._lines.flush()
        answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer

    def until(self, sees: Any) -> dict[str, Any]:
        """Poll the statistics until `sees` accepts them."""
        while True:
            stats: dict[str, Any] = self.call(stats=True)["stats"]
            if sees(stats):
                return stats
            time.sleep(0.02)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Running:
    """A loader's process."""

    def __init__(self, process: "subprocess.Popen[bytes] | Started", folder: Path) -> None:
        self.process = process
        self.socket = folder / "loader.sock"
        self.store = folder / "store"
        self.log = folder / "loader.log"

    def listens(self) -> bool:
        """Whether it accepts connections. Its socket exists a moment before."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def caller(self) -> Caller:
        return Caller(self.socket)

    def processes(self) -> list[int]:
        """Process ids of the fork server and the workers."""
        return [pid for child in children(self.process.pid) for pid in (child, *children(child))]

    def workers(self) -> list[int]:
        return [pid for child in children(self.process.pid) for pid in children(child)]


def children(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextmanager
def loader(folder: Path, model: Path, environment: Mapping[str, str] | None = None, **fields: Any) -> Iterator[Running]:
    """A loader running in `folder` inside the block."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "socket": str(folder / "loader.sock"),
        "model_path": str(model),
        "adapter_store": str(folder / "store"),
        **fields,
    }
    (folder / "loader.json").write_text(json.dumps(config))
    with (folder / "loader.log").open("wb") as log:
        words = ("lorikeet.adapters", str(folder / "loader.json"))
        process: subprocess.Popen[bytes] | Started
        if is_possible():
            process = Started(*words, environment={**os.environ, **(environment or {})}, output=log.fileno())
        else:
            process = subprocess.Popen(python(*words), cwd=ROOT, env={**os.environ, **(environment or {})}, stderr=log)
    try:
        running = Running(process, folder)
        while not running.listens():
            assert process.poll() is None, running.log.read_text()
            time.sleep(0.02)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
