"""The trainer's process: started ahead of the first job or at it, ended by a purge, started again if it has ended.

It is for Linux, as learning is, and has the lowest priority of all processes.
"""

import contextlib
import os
import subprocess
import time
from multiprocessing.connection import Connection

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.learning import Trained, TrainerSettings, TrainingJob
from lorikeet.proto.process import start_connected

log = structlog.get_logger()

MODULE = "lorikeet.adapters.medusa.learning"
ENDED = "the trainer ended: its log has the reason"


class Trainer:
    """One process, which does one job at a time. Its methods are called in one thread, and do not wait."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._cpus = os.sched_getaffinity(0)
        """Before the shard's threads were bound to one each."""
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._job: TrainingJob | None = None
        self._started = 0.0

    @property
    def state(self) -> str:
        """`stopped`, `idle` or `training`."""
        if self._job is not None:
            return "training"
        return "stopped" if self._running is None else "idle"

    @property
    def training_s(self) -> float:
        """How long the current job has run; 0 without one."""
        return 0.0 if self._job is None else time.monotonic() - self._started

    def start(self) -> None:
        """Start the process before there is a job: at idle priority its imports can take minutes on a busy machine."""
        if self._running is not None and self._running[0].poll() is None:
            return
        self.stop()
        process, end = start_connected(MODULE, inherits=[self._settings.rows_fd])
        os.sched_setaffinity(process.pid, self._cpus)
        # it computes only while a processor would be idle
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        self._running = process, Connection(end.detach())
        self._send(self._settings)

    def train(self, job: TrainingJob) -> None:
        """Start a job; none may run. It fits the socket's buffer."""
        assert self._job is None
        self.start()
        self._job, self._started = job, time.monotonic()
        self._send(job)

    def answer(self) -> Trained | None:
        """The answer to the job, an error if the process has ended; None if there is none yet."""
        if self._job is None or self._running is None or not self._running[1].poll():
            return None
        job, self._job = self._job, None
        try:
            answer = self._running[1].recv()
            assert isinstance(answer, Trained)
            return answer
        except (EOFError, OSError):
            log.error("trainer_ended", code=self._running[0].wait())
            self.stop()
            return Trained(job.pair, pb.LearningDecision(decision="failed", reason=ENDED), 0.0)

    def stop(self) -> None:
        """End the process with all that it has learned; a job gives no answer."""
        running, self._running, self._job = self._running, None, None
        if running is not None:
            running[0].kill()
            running[0].wait()
            running[1].close()

    def _send(self, message: TrainerSettings | TrainingJob) -> None:
        assert self._running is not None
        with contextlib.suppress(OSError):  # it has ended, as `answer` says
            self._running[1].send(message)
