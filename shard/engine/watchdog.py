"""Monitors the step loop from a separate thread: marks that it has served, and ends the process when a step hangs."""

import os
import threading
import time
from pathlib import Path

import structlog

from lorikeet.shard.engine.engine import Engine

log = structlog.get_logger()

POLL_S = 0.1
STUCK_EXIT = 3


class Watchdog(threading.Thread):
    """Monitors one engine."""

    def __init__(self, engine: Engine, served_file: str | None, step_timeout_s: float) -> None:
        """`served_file` is created once a request was completed. `step_timeout_s`: 0 never times out."""
        super().__init__(name="watchdog", daemon=True)
        self._engine = engine
        self._served_file = Path(served_file) if served_file else None
        self._step_timeout_s = step_timeout_s

    def run(self) -> None:
        while True:
            self.poll()
            time.sleep(POLL_S)

    def poll(self) -> None:
        """Check once."""
        if self._served_file and self._engine.has_served:
            self._served_file.touch()
            self._served_file = None
        number, started = self._engine.running_step
        if number and 0 < self._step_timeout_s < time.monotonic() - started:
            log.error("step_hung", step=number, timeout_s=self._step_timeout_s)
            os._exit(STUCK_EXIT)
