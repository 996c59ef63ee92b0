"""The trainer's process: its priority, its answers, its end with the shard, and its restart."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.learning import RowsLayout, Trained, TrainerSettings, TrainingJob
from lorikeet.shard.learning.learning import ENDED, Rings, Trainer
from tests import tiny
from tests.e2e.launched import alive

WAIT_S = 300.0
PAIR = ("one", "")
pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="idle priority is Linux's")]


class Running:
    """A trainer of a tiny model with rows of two texts that repeat themselves."""

    def __init__(self, folder: Path) -> None:
        base = tiny.make("llama", folder / "base")
        size = int(json.loads((base / "config.json").read_text())["hidden_size"])
        self.rings = Rings(RowsLayout.within(1 << 20, size))
        random = np.random.default_rng(0)
        for text in range(20):
            hidden = np.full((64, size), 0x3F80, np.uint16) ^ random.integers(0, 64, (64, size)).astype(np.uint16)
            self.rings.append(PAIR, [text] * 64, [at % 5 + 3 for at in range(64)], hidden)
        settings = TrainerSettings(
            str(base), False, "float32", str(folder / "store"), 1 << 30, self.rings.fd, self.rings.layout
        )
        self.trainer = Trainer(settings)

    def train(self) -> int:
        """Start a job; returns the process."""
        self.trainer.train(TrainingJob(PAIR, self.rings.blocks(PAIR), 10**6, "", 0.0))
        return self.process.pid

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self.trainer._running is not None
        return self.trainer._running[0]

    def answer(self) -> Trained:
        """Wait for the answer to the job."""
        end = time.monotonic() + WAIT_S
        while (answer := self.trainer.answer()) is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        return answer


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    found = Running(tmp_path)
    yield found
    found.trainer.stop()


def test_it_has_the_lowest_priority_and_stores_heads(running: Running, tmp_path: Path) -> None:
    pid = running.train()
    assert running.trainer.state == "training"
    await_idle_priority(pid)
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    speed_up(pid)
    answer = running.answer().decision
    assert answer.decision == "adopted" and answer.num_rows > 0 and answer.tokens_per_step >= 1
    assert (tmp_path / "store" / f"{answer.heads_digest}.safetensors").is_file()
    assert running.trainer.state == "idle" and running.train() == pid


def test_one_that_is_started_ahead_does_the_first_job(running: Running) -> None:
    running.trainer.start()
    process = running.process
    assert running.trainer.state == "idle"
    await_idle_priority(process.pid)
    speed_up(process.pid)
    running.trainer.start()
    assert running.train() == process.pid
    assert running.answer().decision.decision == "adopted"


def test_one_that_ends_answers_and_is_started_again(running: Running) -> None:
    pid = running.train()
    os.kill(pid, signal.SIGKILL)
    assert running.answer() == Trained(PAIR, pb.LearningDecision(decision="failed", reason=ENDED), 0.0)
    assert running.trainer.state == "stopped"
    again = running.train()
    assert again != pid
    running.trainer.stop()
    assert not alive(again) and running.trainer.state == "stopped"
    assert running.trainer.answer() is None


def test_it_ends_when_the_shard_is_gone(running: Running) -> None:
    pid = running.train()
    await_idle_priority(pid)
    speed_up(pid)
    assert running.trainer._running is not None
    process, connection = running.trainer._running
    connection.close()
    assert process.wait(WAIT_S) == 0
    running.trainer._running = None


def await_idle_priority(pid: int) -> None:
    """The process lowers its own priority before it imports anything large."""
    end = time.monotonic() + WAIT_S / 2
    while os.sched_getscheduler(pid) != os.SCHED_IDLE:
        assert alive(pid) and time.monotonic() < end
        time.sleep(0.001)


def speed_up(pid: int) -> None:
    """Where other tests keep every processor busy, the lowest priority would wait for their end."""
    try:
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, 0)
    except PermissionError:
        pass
