"""Supervision of processes, with small processes that stand in for shard, loader and router."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.processes import supervisor
from lorikeet.launcher.processes.supervisor import (
    SAME_REQUEST_S,
    Address,
    Processes,
    ShardFiles,
    ShardStart,
    Signals,
    Supervisor,
)
from lorikeet.proto.children import Child

ROOT = Path(__file__).parents[3]
ENVIRONMENT = dict(os.environ) | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
LOG = logging.getLogger("tests.launcher")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def gone(pid: int) -> bool:
    """Whether the process has exited (a zombie has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


class Server:
    """A supervisor of stand-ins, and the events that they logged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder / "log"
        self.served, self.stuck = folder / "shard.served", folder / "shard.stuck"
        self.broken: dict[str, Any] = {}
        """Fields that replace those of the next router's configuration."""
        self.replacement = folder / "router.replacement"
        self.shard_ready, self.router_ready = folder / "shard.ready", folder / "router.ready"
        self.ready = False
        self.signals = Signals()
        self.has_loader = False
        self.starts: list[str] = []
        """Names of the processes in the order of their starts. Each logs its own start, in any order."""

    def run(
        self,
        shard: dict[str, Any],
        router: dict[str, Any],
        loader: dict[str, Any] | None = None,
        *,
        drain: float = 5,
        at: str = "ready",
    ) -> Exit:
        """Run with these configurations. SIGTERM arrives once it is `ready`, `twice`, or `never`."""
        start_shard = lambda: self.child(
            "shard", {"served_file": str(self.served), "ready_file": str(self.shard_ready)} | shard
        )
        of_router = {"port": self.port, "ready_file": str(self.router_ready)} | router
        start_router = lambda: self.child("router", of_router | self.broken)
        self.has_loader = loader is not None
        start_loader = None if loader is None else lambda: self.child("loader", loader)
        files = ShardFiles(self.served, self.stuck, self.shard_ready)
        processes = Processes(
            [ShardStart(start_shard, files)], start_router, self.router_ready, self.replacement, start_loader
        )
        supervisor = Supervisor(processes, Address("0.0.0.0", self.port).is_ready, drain, LOG)
        return supervisor.run(self.signals, lambda: self.when_ready(at))

    def when_ready(self, at: str) -> None:
        self.ready = True
        end = time.monotonic() + 60
        names = {"shard started", "router started"} | ({"loader started"} if self.has_loader else set())
        while not names <= set(self.events) and time.monotonic() < end:
            time.sleep(0.02)
        if at == "twice":
            threading.Timer(2 * SAME_REQUEST_S, lambda: self.signals._note(signal.SIGTERM, None)).start()
        for _ in range({"ready": 1, "at once": 2, "twice": 1, "never": 0}[at]):
            self.signals._note(signal.SIGTERM, None)

    def child(self, name: str, config: dict[str, Any]) -> Child:
        path = self.folder / f"{name}.json"
        failure = self.folder / f"{name}.failed"
        self.starts.append(name)
        path.write_text(json.dumps({"name": name, "log": str(self.log), "failure_file": str(failure)} | config))
        return Child(name, "tests.launcher.processes.stand_in", path, ENVIRONMENT, failure_file=failure)

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []  # a child may exit before its first event

    @property
    def events(self) -> list[str]:
        return [line.rpartition(" ")[0] for line in self.lines]

    def all_gone(self) -> bool:
        return all(gone(int(line.rpartition(" ")[2])) for line in self.lines)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    result = Server(tmp_path)
    yield result
    assert result.all_gone()


def test_a_signal_ends_the_router_first(server: Server) -> None:
    assert server.run({}, {"drain_s": 0.2}) is Exit.OK
    assert server.ready
    ends = [event for event in server.events if "started" not in event]
    assert ends == ["router SIGTERM", "router ended", "shard SIGTERM", "shard ended"]


def test_a_shard_that_dies_at_start_is_reported(server: Server) -> None:
    # The router does not listen there, so the server is never ready.
    with pytest.raises(LauncherError, match="shard ended with exit code 7 before the server was ready") as caught:
        server.run({"die_after_s": 0.0, "exit_code": 7}, {"port": free_port()}, at="never")
    assert caught.value.exit is Exit.SHARD_CANNOT_START
    assert not server.ready


def test_the_reason_of_a_failed_start_is_the_last_sentence_and_nothing_else_is_said(
    server: Server, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LauncherError) as caught:
        server.run(
            {"die_after_s": 0.3, "exit_code": 1, "reason": "it is too\nlarge", "lingers_s": 60},
            {"port": free_port(), "says_at_end": "a shard is lost"},
            at="never",
        )
    assert str(caught.value) == "shard could not start: it is too large"
    assert "router SIGTERM" not in server.events
    assert "a shard is lost" not in capfd.readouterr().err
    assert not caplog.records


def test_a_router_that_dies_at_start_is_reported(server: Server) -> None:
    with pytest.raises(LauncherError, match="router ended with exit code 3 before the server was ready") as caught:
        server.run({}, {"port": free_port(), "die_after_s": 0.2, "exit_code": 3}, at="never")
    assert caught.value.exit is Exit.WEBSERVER_CANNOT_START


def pids(server: Server, name: str) -> list[int]:
    return [int(line.rpartition(" ")[2]) for line in server.lines if line.startswith(f"{name} started")]


def after_ready(server: Server, then: Callable[[], None]) -> None:
    """Call `then` in a thread once the server is ready; SIGTERM follows."""
    when_ready = server.when_ready

    def act() -> None:
        then()
        server.signals._note(signal.SIGTERM, None)

    def start(at: str) -> None:
        when_ready("never")
        threading.Thread(target=act).start()

    server.when_ready = start  # type: ignore[method-assign]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["shard", "router", pytest.param("loader", marks=pytest.mark.long)])
def test_what_is_killed_while_serving_is_started_again(server: Server, name: str) -> None:
    def kill() -> None:
        os.kill(pids(server, name)[0], signal.SIGKILL)
        until(lambda: len(pids(server, name)) == 2)

    after_ready(server, kill)
    assert server.run({}, {}, {}) is Exit.OK
    assert {other: len(pids(server, other)) for other in ("shard", "router", "loader")} == {
        other: 1 + (other == name) for other in ("shard", "router", "loader")
    }


def test_every_process_is_replaced_while_others_serve(server: Server) -> None:
    """First the shard, then the loader; the router hands over once its successor is ready."""

    def replace() -> None:
        server.signals._note(signal.SIGUSR2, None)
        until(lambda: server.events.count("router ended") == 1)
        time.sleep(0.3)

    after_ready(server, replace)
    assert server.run({}, {}, {}) is Exit.OK
    events = server.events
    for replaced in (
        ["shard SIGTERM", "shard ended", "shard started", "router started", "router SIGUSR1", "router ended"],
        ["shard started", "loader started"],
    ):
        places = [events.index(event, 3) for event in replaced]
        assert places == sorted(places)
    assert server.starts[3:] == ["shard", "loader", "router"]
    assert not server.replacement.exists()


@pytest.mark.long
def test_a_router_that_cannot_be_replaced_stays(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.launcher.processes.supervisor._SHARD_END_S", 0.5)

    def replace() -> None:
        server.signals._note(signal.SIGUSR2, None)
        until(lambda: server.events.count("router started") == 2)
        until(lambda: gone(pids(server, "router")[1]))
        assert "router SIGUSR1" not in server.events
        assert not gone(pids(server, "router")[0])

    after_ready(server, replace)
    assert server.run({}, {"ready_file": str(server.folder / "elsewhere")}, drain=0.5) is Exit.OK


@pytest.mark.long
def test_a_router_that_ends_in_place_of_another_leaves_that_alone(server: Server) -> None:
    """For example one of a broken version."""

    def replace() -> None:
        server.broken = {"die_after_s": 0.0, "exit_code": 3}
        server.signals._note(signal.SIGUSR2, None)
        until(lambda: server.events.count("router started") == 2)
        time.sleep(1.5)
        assert server.events.count("router started") == 2
        assert not gone(pids(server, "router")[0])

    after_ready(server, replace)
    # The stand-in does not create the router's ready file.
    assert server.run({}, {"ready_file": str(server.folder / "elsewhere")}) is Exit.OK


def test_a_shard_that_hangs_is_ended_and_started_again(server: Server) -> None:
    """The router creates a file to report it."""

    def halt() -> None:
        (pid,) = pids(server, "shard")
        os.kill(pid, signal.SIGSTOP)
        server.stuck.touch()
        until(lambda: len(pids(server, "shard")) == 2)
        assert not server.stuck.exists()

    after_ready(server, halt)
    assert server.run({}, {}) is Exit.OK


def test_a_shard_that_always_dies_ends_everything(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "DELAYS", (0.0,))
    with pytest.raises(LauncherError, match=r"exit code 4, the 5th time in a row without") as caught:
        server.run({"die_after_s": 0.3, "exit_code": 4}, {}, at="never")
    assert caught.value.exit is Exit.SHARD_KEEPS_ENDING
    assert len(pids(server, "shard")) == 5


@pytest.mark.long
def test_a_shard_that_serves_in_between_may_die_any_number_of_times(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "DELAYS", (0.0,))
    after_ready(server, lambda: until(lambda: len(pids(server, "shard")) == 8))
    shard = {"die_after_s": 0.3, "exit_code": 4, "serves": True}
    try:
        server.run(shard, {})
    except LauncherError as error:  # the last one may just have exited
        assert error.exit is Exit.SHARD_FAILED


@pytest.mark.long
def test_a_shard_that_dies_while_the_router_drains_is_reported(server: Server) -> None:
    with pytest.raises(LauncherError, match="shard ended with exit code 4 before the router had drained") as caught:
        server.run({"die_after_s": 1.5, "exit_code": 4}, {"drain_s": 2.5})
    assert caught.value.exit is Exit.SHARD_FAILED


@pytest.mark.long
def test_a_router_that_always_dies_ends_everything(server: Server) -> None:
    with pytest.raises(LauncherError, match="router ended with exit code 3 repeatedly") as caught:
        server.run({}, {"die_after_s": 0.3, "exit_code": 3}, at="never")
    assert caught.value.exit is Exit.WEBSERVER_FAILED


def test_a_loader_that_dies_at_start_is_reported(server: Server) -> None:
    with pytest.raises(LauncherError, match="loader ended with exit code 5 before the server was ready") as caught:
        server.run({}, {"port": free_port()}, {"die_after_s": 0.0, "exit_code": 5}, at="never")
    assert caught.value.exit is Exit.LOADER_FAILED


@pytest.mark.long
def test_a_loader_that_always_dies_ends_everything(server: Server) -> None:
    with pytest.raises(LauncherError, match="repeatedly while serving") as caught:
        server.run({}, {}, {"die_after_s": 0.5, "exit_code": 1}, at="never")
    assert caught.value.exit is Exit.LOADER_FAILED


def test_a_second_signal_forces(server: Server) -> None:
    assert server.run({"ignore_sigterm": True}, {"ignore_sigterm": True}, drain=60, at="twice") is Exit.FORCED


def test_signals_of_one_moment_are_one_request(server: Server) -> None:
    assert server.run({}, {"drain_s": 2 * SAME_REQUEST_S}, at="at once") is Exit.OK


def test_a_router_that_does_not_drain_is_killed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.launcher.processes.supervisor._ROUTER_GRACE_S", 0.2)
    with pytest.raises(LauncherError, match="did not drain in time") as caught:
        server.run({}, {"ignore_sigterm": True}, drain=0.1)
    assert caught.value.exit is Exit.WEBSERVER_FAILED


@pytest.mark.long
def test_a_signal_before_readiness_ends_quietly(server: Server) -> None:
    # No router listens here, so the server is never ready.
    stand_in_ready = {"port": free_port()}
    threading.Timer(1.5, lambda: server.signals._note(signal.SIGTERM, None)).start()
    assert server.run({}, stand_in_ready, at="never") is Exit.OK
    assert not server.ready


def test_children_die_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    config = tmp_path / "child.json"
    config.write_text(json.dumps({"name": "child", "log": str(tmp_path / "log")}))
    code = (
        "import os, time; from pathlib import Path; from lorikeet.proto.children import Child\n"
        f"Child('child', 'tests.launcher.processes.stand_in', Path({str(config)!r}), os.environ); time.sleep(600)"
    )
    log = tmp_path / "log"
    log.touch()
    end = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, cwd=ROOT) as parent:
        try:
            while "\n" not in log.read_text() and time.monotonic() < end:
                time.sleep(0.05)
            child = int(log.read_text().split()[2])
            assert not gone(child)
        finally:
            parent.kill()
    while not gone(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert gone(child)


def test_addresses_are_shown_as_they_can_be_reached() -> None:
    assert Address("0.0.0.0", 80).url == "http://127.0.0.1:80"
    assert Address("::", 80).url == "http://[::1]:80"
    assert Address("10.0.0.1", 8080).url == "http://10.0.0.1:8080"
