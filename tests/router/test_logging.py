"""Log lines as an operator's system reads them."""

import json
import logging
import subprocess
import sys

import pytest

from lorikeet.router.logging import configure_logging

PROGRAM = """
import logging, structlog, threading, warnings
from lorikeet.router.logging import configure_logging
configure_logging({level!r}, json_output={json_output})
with structlog.contextvars.bound_contextvars(request_id="r1"):
    structlog.get_logger().info("ours", num_tokens=3)
    logging.getLogger("other").warning("theirs %d", 4)
    logging.getLogger("httpx").info("GET http://hub/api/models/what a caller wrote")
structlog.get_logger().debug("small")
logging.getLogger("uvicorn.access").error("never")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("broken")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("nobody caught this")
"""


def lines(level: str, json_output: bool) -> list[str]:
    program = PROGRAM.format(level=level, json_output=json_output)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def test_json_lines_carry_the_request_s_id() -> None:
    ours, theirs, broken, warning, thread, last = (json.loads(line) for line in lines("info", json_output=True))
    assert (ours["event"], ours["num_tokens"], ours["request_id"], ours["level"]) == ("ours", 3, "r1", "info")
    assert (theirs["event"], theirs["request_id"], theirs["level"]) == ("theirs 4", "r1", "warning")
    assert "ZeroDivisionError" in broken["exception"]
    assert ours["timestamp"].endswith("Z")
    assert "a warning" in warning["event"]
    assert "ZeroDivisionError" in thread["exception"]
    assert "RuntimeError: nobody caught this" in last["exception"]


def test_the_console_has_the_same() -> None:
    shown = lines("debug", json_output=False)
    assert "ours" in shown[0]
    assert "request_id=r1" in shown[0]
    assert any("small" in line for line in shown)
    assert not any("never" in line or "what a caller wrote" in line for line in shown)


def test_the_level_holds() -> None:
    told = [json.loads(line)["event"] for line in lines("error", json_output=True)]
    assert told == ["broken", "uncaught_exception", "uncaught_exception"]


def test_an_unknown_level_is_named() -> None:
    before = logging.getLogger().handlers[:]
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        configure_logging("loud")
    assert logging.getLogger().handlers == before
