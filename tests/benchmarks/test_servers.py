"""Servers under measurement end with the measurement, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.load.servers import REPOSITORY

MEASUREMENT = """
import sys, time
from benchmarks.load import servers
command = servers.Command((sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"), {}, "/")
with servers.running("nothing", command) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


def test_a_server_does_not_outlive_a_measurement_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", MEASUREMENT], cwd=REPOSITORY, stdout=subprocess.PIPE) as measurement:
        assert measurement.stdout is not None
        server = int(measurement.stdout.readline())
        state = Path(f"/proc/{server}/stat")
        assert state.exists()
        os.kill(measurement.pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.02)
