"""The trainer's process: started ahead of the first job or at it, ended by a purge, started again if it has ended.

It is for Linux, as learning is, and has the lowest priority of all processes.
"""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable

import structlog

from lorikeet.proto.learning import Trained, TrainerSettings, TrainingJob, read_trained, write_line
from lorikeet.proto.process import python

log = structlog.get_logger()

MODULE = "lorikeet.adapters.medusa.learning"
ENDED = "the trainer ended: its log has the reason"


class Trainer:
    """One process, which does one job at a time."""

    def __init__(self, settings: TrainerSettings, answer: Callable[[Trained], None]) -> None:
        """`answer` is called in a thread of this object."""
        self._settings, self._answer = settings, answer
        self._cpus = os.sched_getaffinity(0)
        """Before the shard's threads were bound to one each."""
        self._process: subprocess.Popen[bytes] | None = None
        self._job: TrainingJob | None = None
        self._started = 0.0
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """`stopped`, `idle` or `training`."""
        if self._job is not None:
            return "training"
        return "stopped" if self._process is None else "idle"

    @property
    def training_s(self) -> float:
        """How long the current job has run; 0 without one."""
        return 0.0 if self._job is None else time.monotonic() - self._started

    def start(self) -> None:
        """Start the process before there is a job: at idle priority its imports can take minutes on a busy machine."""
        with self._lock:
            if self._process is None:
                self._start()

    def train(self, job: TrainingJob) -> None:
        """Start a job; none may run. Its line fits the pipe's buffer, so this never waits."""
        with self._lock:
            assert self._job is None
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            self._job, self._started = job, time.monotonic()
            try:
                self._process.stdin.write(write_line(job))
                self._process.stdin.flush()
            except OSError:
                pass  # it has ended: its reader says so

    def stop(self) -> None:
        """End the process with all that it has learned; a job gives no answer."""
        with self._lock:
            process, self._process, self._job = self._process, None, None
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> None:
        process = subprocess.Popen(
            python(MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._settings.rows_fd],
        )
        assert process.stdin is not None
        os.sched_setaffinity(process.pid, self._cpus)
        # it computes only while a processor would be idle
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        process.stdin.write(write_line(self._settings))
        self._process = process
        threading.Thread(target=self._read, args=(process,), name="trainer answers", daemon=True).start()

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None and process.stdout is not None
        for line in process.stdout:
            self._take(process, read_trained(line))
        process.wait()
        with self._lock:
            is_current, job = process is self._process, self._job
            if is_current:
                self._process = None
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # a job that it did not read
                stream.close()
        if is_current:
            log.error("trainer_ended", code=process.returncode)
            if job is not None:
                self._take(None, Trained(job.pair, error=ENDED))

    def _take(self, process: "subprocess.Popen[bytes] | None", answer: Trained) -> None:
        with self._lock:
            if process is not self._process or self._job is None:
                return  # stopped since
            self._job = None
        self._answer(answer)
