"""With JSON lines, whatever the launcher's process prints is JSON."""

import json
import subprocess
import sys

PROGRAM = """
import logging, sys, threading, warnings
from launcher import logs

log = logs.start(True, "info", sys.stderr)
library = logging.getLogger("some.library")
library.addHandler(logging.StreamHandler())
logs.adopt_libraries()
log.info("ours %d", 3)
library.warning("theirs")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("nobody caught this")
"""


def test_every_line_is_json() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    told = [json.loads(line)["fields"] for line in done.stderr.splitlines()]
    assert [fields["message"] for fields in told[:2]] == ["ours 3", "theirs"]
    assert "a warning" in told[2]["message"]
    assert "ZeroDivisionError" in told[3]["exception"]
    assert "RuntimeError: nobody caught this" in told[4]["exception"]
    assert len(told) == 5


def test_an_error_of_the_command_line_is_json_too() -> None:
    command = [sys.executable, "-m", "lorikeet.launcher", "--json-output", "--prot", "80"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["fields"]["message"] == "unknown flag --prot: did you mean --port?"
