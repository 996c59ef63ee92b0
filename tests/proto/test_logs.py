"""Log lines as an operator's system reads them: ours, libraries', warnings and uncaught exceptions in one form."""

import json
import logging
import os
import re
import socket
import subprocess
import sys

import pytest

from lorikeet.launcher.__main__ import main
from lorikeet.proto import logs

PROGRAM = """
import logging, structlog, sys, threading, warnings
from lorikeet.proto import logs
{configure}
library = logging.getLogger("some.library")
library.addHandler(logging.StreamHandler())
library.propagate = False
logs.adopt_libraries()
{ours}
library.warning("theirs %d", 4)
logging.getLogger("httpx").info("GET http://hub/api/models/what a caller wrote")
logging.getLogger("uvicorn.access").error("never")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0, name="a thread")
thread.start()
thread.join()
raise RuntimeError("nobody caught this")
"""
EVENTS = """
log = structlog.get_logger()
with structlog.contextvars.bound_contextvars(request_id="r1"):
    log.info("ours", num_tokens=3)
log.debug("small")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broken")
"""
PROCESSES = {
    "structlog": ("logs.configure({json}, 'info')", 'structlog.get_logger().info("ours")'),
    "launcher": ("log = logs.start_launcher({json}, 'info', sys.stderr)", 'log.info("it_is_ours: ours %d", 3)'),
}


def lines(level: str, json_output: bool) -> list[str]:
    configure = f"logs.configure({json_output}, {level!r}, 'shard', ['uvicorn.access'])"
    program = PROGRAM.format(configure=configure, ours=EVENTS)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def writes(program: str) -> list[str]:
    """What a process writes to its standard error, write by write."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # as the launcher sets it
    with ours:
        with its:
            process = subprocess.Popen([sys.executable, "-c", program], stderr=its, env=environment)
        found = list(iter(lambda: ours.recv(1 << 20).decode(), ""))
    assert process.wait(60) == 1
    return found


def test_json_lines_carry_process_and_request() -> None:
    ours, broken, theirs, warning, thread, last = (json.loads(line) for line in lines("info", json_output=True))
    assert (ours["event"], ours["num_tokens"], ours["request_id"], ours["level"]) == ("ours", 3, "r1", "info")
    assert (theirs["event"], theirs["process"], theirs["level"]) == ("library_message", "shard", "warning")
    assert theirs["message"] == "theirs 4"
    assert "ZeroDivisionError" in broken["exception"]
    assert ours["process"] == "shard"
    assert ours["timestamp"].endswith("Z") and theirs["timestamp"].endswith("Z")
    assert "a warning" in warning["message"]
    assert (thread["event"], thread["thread"]) == ("uncaught_exception", "a thread")
    assert "ZeroDivisionError" in thread["exception"]
    assert "RuntimeError: nobody caught this" in last["exception"]


def test_console_lines_hold_the_same() -> None:
    shown = "\n".join(lines("debug", json_output=False))
    for part in ("ours", "request_id", "small", "theirs 4", "a warning", "ZeroDivisionError", "nobody caught this"):
        assert part in shown
    assert "never" not in shown and "what a caller wrote" not in shown


def test_lines_below_the_level_are_dropped() -> None:
    events = [json.loads(line)["event"] for line in lines("error", json_output=True)]
    assert events == ["broken", "uncaught_exception", "uncaught_exception"]


def test_an_unknown_level_is_an_error() -> None:
    before = logging.getLogger().handlers[:]
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        logs.configure(True, "loud")
    assert logging.getLogger().handlers == before


@pytest.mark.parametrize("name", PROCESSES)
def test_a_line_of_json_is_one_write(name: str) -> None:
    """A server's processes write to one pipe: what is not one write may have another's line inside it."""
    configure, ours = PROCESSES[name]
    found = writes(PROGRAM.format(configure=configure.format(json=True), ours=ours))
    found = [line for line in found if '"never"' not in line]
    assert len(found) == 5
    assert all(line.startswith("{") and line.endswith("}\n") and line.count("\n") == 1 for line in found), found


def test_every_process_has_one_json_schema() -> None:
    """Events are snake_case; the launcher's sentences and libraries' texts are messages."""
    configure, ours = PROCESSES["launcher"]
    found = [json.loads(line) for line in writes(PROGRAM.format(configure=configure.format(json=True), ours=ours))]
    found += [json.loads(line) for line in lines("info", json_output=True)]
    assert all({"timestamp", "level", "process", "event"} <= set(line) for line in found)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", line["event"]) for line in found)
    launcher = [line for line in found if line["process"] == "launcher" and line.get("message") != "never"]
    assert [line["level"] for line in launcher] == ["info", "warning", "warning", "error", "error"]
    assert [(line["event"], line["message"]) for line in launcher[:2]] == [
        ("it_is_ours", "ours 3"),
        ("library_message", "theirs 4"),
    ]
    assert "a warning" in launcher[2]["message"]
    assert "ZeroDivisionError" in launcher[3]["exception"]
    assert "RuntimeError: nobody caught this" in launcher[4]["exception"]


def test_lines_for_people_have_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines("info", json_output=False)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO    shard: ours num_tokens=3 request_id=r1", shown[0])
    log = logs.start_launcher(False, "info", sys.stdout)
    log.warning("it_is_ours: a sentence")
    printed = capsys.readouterr().out
    assert re.fullmatch(r"\S+Z WARNING launcher: it_is_ours: a sentence\n", printed)
    event = {"timestamp": "2026-01-31T12:00:00.1Z", "level": "info", "process": "shard", "event": "kv_memory"}
    line = logs._plain(None, "info", {**event, "kv_bytes": 4_200_000_000, "num_pages": 7, "why": "it is so"})
    assert line == "2026-01-31T12:00:00Z INFO    shard: kv_memory kv_bytes=4.2GB num_pages=7 why='it is so'"


def test_an_error_of_the_command_line_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json-output", "--prot", "80"]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    read = json.loads(line)
    assert (out, read["event"], read["process"]) == ("", "launcher_failed", "launcher")
    assert read["message"] == "unknown flag --prot: did you mean --port?"
