"""Server processes: started on a free port, awaited until ready, stopped for a while, ended with their group."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lorikeet.proto.process import free_port, tethered

REPOSITORY = Path(__file__).parents[2]
LOGS = Path(__file__).parents[1] / ".runs" / "logs"
STOP_S = 40.0


TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""The system counts processor time in these."""


@dataclass(frozen=True)
class Command:
    """How one server process is started, but for its port."""

    arguments: tuple[str, ...]
    """The program by its whole path."""
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"


@dataclass(frozen=True)
class RunningServer:
    """A running server."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    ready_s: float
    """Seconds from start to the first successful readiness answer."""
    log: Path

    def cpu_seconds(self) -> float:
        """Processor time used so far by every process of the server."""
        return sum(cpu_seconds(pid) for pid in group(self.process.pid))

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """No process of the server runs meanwhile, so that its neighbour has the machine for itself."""
        pids = group(self.process.pid)
        _signal(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(pids, signal.SIGCONT)

    def alive(self) -> bool:
        return self.process.poll() is None


def lorikeet(model: str | Path | None, *flags: str) -> Command:
    """Our own server, with the launcher's defaults; without a model the embedded one."""
    named = () if model is None else ("--model-id", str(model))
    arguments = (
        sys.executable,
        "-m",
        "lorikeet.launcher",
        *named,
        "--hostname",
        "127.0.0.1",
        "--port",
        "{port}",
        *flags,
    )
    return Command(arguments, {"HF_HUB_OFFLINE": "1"}, "/ready")


@contextlib.contextmanager
def running(name: str, command: Command, timeout_s: float = 400.0) -> Iterator[RunningServer]:
    """A server that is ready; ended, with everything it started, on the way out."""
    LOGS.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = LOGS / f"{name}-{os.getpid()}-{port}.log"
    arguments = [argument.replace("{port}", str(port)) for argument in command.arguments]
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            tethered(arguments),  # a measurement that is killed leaves no server
            env={**os.environ, **command.environment},
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        await_ready(process, port, command.ready_path, start + timeout_s, log)
        yield RunningServer(name, process, port, time.monotonic() - start, log)
    finally:
        stop(process)


def await_ready(process: subprocess.Popen[bytes], port: int, path: str, until: float, log: Path) -> None:
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"server ended with {process.returncode} before it was ready: {tail(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.02)
    raise TimeoutError(f"server not ready in time: {tail(log)}")


def stop(process: subprocess.Popen[bytes]) -> int:
    """SIGTERM, then SIGKILL to what is left of the group. Returns the exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def tail(log: Path, size: int = 2000) -> str:
    return log.read_text(errors="replace")[-size:]


def group(leader: int) -> list[int]:
    """Processes of the session that `leader` opened."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(folder.name)) == leader:
                    pids.append(int(folder.name))
    return pids


def _signal(pids: list[int], which: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, its threads included; 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
