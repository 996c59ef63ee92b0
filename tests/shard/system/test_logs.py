"""Every log line of a shard has one format: ours, those of libraries, warnings and uncaught exceptions."""

import json
import subprocess
import sys

PROGRAM = """
import logging, threading, warnings
import structlog
from lorikeet.shard.system import logs

logs.configure({json_output}, "info")
library = logging.getLogger("some.library")
library.addHandler(logging.StreamHandler())
library.propagate = False
logs.adopt_libraries()
structlog.get_logger().info("ours", num_tokens=3)
library.info("of no interest")
library.warning("theirs %d", 4)
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0, name="a thread")
thread.start()
thread.join()
raise RuntimeError("an uncaught error")
"""


def lines(json_output: bool) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(json_output=json_output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def test_every_line_is_json() -> None:
    ours, theirs, warning, thread, last = (json.loads(line) for line in lines(json_output=True))
    assert (ours["event"], ours["num_tokens"], ours["process"], ours["level"]) == ("ours", 3, "shard", "info")
    assert (theirs["event"], theirs["process"], theirs["level"]) == ("theirs 4", "shard", "warning")
    assert "a warning" in warning["event"]
    assert (thread["event"], thread["thread"]) == ("uncaught exception", "a thread")
    assert "ZeroDivisionError" in thread["exception"]
    assert "RuntimeError: an uncaught error" in last["exception"]
    assert ours["timestamp"].endswith("Z") and theirs["timestamp"].endswith("Z")


def test_text_logs_have_the_same_content() -> None:
    shown = "\n".join(lines(json_output=False))
    for text in ("ours", "theirs 4", "a warning", "ZeroDivisionError", "an uncaught error"):
        assert text in shown
    assert "of no interest" not in shown
