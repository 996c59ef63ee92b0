"""Looks at the step loop from a thread of its own: notes that it has served, and ends the process when a step hangs."""

import os
import threading
import time
from pathlib import Path

import structlog

from lorikeet.shard.engine.engine import Engine

log = structlog.get_logger()

LOOK_S = 0.1
STUCK_EXIT = 3


class Watchdog(threading.Thread):
    """Of one engine."""

    def __init__(self, engine: Engine, served_file: str | None, step_timeout_s: float) -> None:
        """`served_file`: a file that appears once a request was completed. `step_timeout_s`: 0 is never."""
        super().__init__(name="watch", daemon=True)
        self._engine = engine
        self._mark = None if served_file is None else Path(served_file)
        self._step_timeout_s = step_timeout_s

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Once."""
        if self._mark is not None and self._engine.has_served:
            self._mark.touch()
            self._mark = None
        number, started = self._engine.running_step
        if number and 0 < self._step_timeout_s < time.monotonic() - started:
            log.error("step hangs", step=number, timeout_s=self._step_timeout_s)
            os._exit(STUCK_EXIT)
