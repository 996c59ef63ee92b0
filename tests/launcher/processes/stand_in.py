"""A small process that stands in for a shard or router: `python -m tests.launcher.processes.stand_in CONFIG`.

The configuration says what to do: `port` to answer `GET /ready` on, `die_after_s` and `exit_code` to end by itself,
`reason` to leave at `failure_file` then and `lingers_s` to wait after that, `says_at_end` to print at SIGTERM,
`serves` to leave the mark at `served_file`, `ignore_sigterm`, `drain_s` to take so long to end, `log` to append its
events to.
"""

import http.server
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lorikeet.proto.process import report_failure


class Ready(http.server.BaseHTTPRequestHandler):
    """Answers 200 to everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Nothing: the tests read standard output."""


class Shared(http.server.HTTPServer):
    """Two of them may listen for a while."""

    allow_reuse_port = True


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())

    def note(event: str) -> None:
        with Path(config["log"]).open("a") as file:
            file.write(f"{config['name']} {event} {os.getpid()}\n")

    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        note("SIGTERM")
        print(config.get("says_at_end", ""), file=sys.stderr)
        if not config.get("ignore_sigterm"):
            ended.set()

    def hand_over(number: int, frame: FrameType | None) -> None:
        note("SIGUSR1")
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, hand_over)
    if "port" in config:
        server = Shared(("127.0.0.1", config["port"]), Ready)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    note("started")
    if "ready_file" in config:
        Path(config["ready_file"]).touch()
    if config.get("serves"):
        Path(config["served_file"]).touch()
    if ended.wait(config.get("die_after_s")):
        time.sleep(config.get("drain_s", 0))
        note("ended")
        sys.exit(0)
    if "reason" in config:
        report_failure(config["failure_file"], config["reason"])
        time.sleep(config.get("lingers_s", 0))
    sys.exit(config["exit_code"])


if __name__ == "__main__":
    main()
