"""Runs a training to some step: prints how it goes and leaves checkpoints. Knows nothing of what is trained."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lorikeet.demo.training.trainer import Progress

PRINT_EVERY = 10.0
"""Seconds."""


class Training(Protocol):
    """What can be run step by step."""

    step: int

    def run_step(self) -> Progress: ...

    def save(self, path: Path) -> None: ...


def run_until(
    stop: int, training: Training, checkpoint: Path, save_every: float, *, name: str = "", tokens_per_step: int = 0
) -> None:
    """save_every in seconds; the last checkpoint is of step `stop`. Lines begin with a name, and tell tokens per second
    where a step's tokens are known."""
    saved = printed = time.monotonic()
    recent: list[Progress] = []
    while training.step < stop:
        recent.append(training.run_step())
        now = time.monotonic()
        if now - printed > PRINT_EVERY or training.step == stop:
            print(f"{name}{': ' if name else ''}{_progress(recent, stop, tokens_per_step)}", flush=True)
            recent, printed = [], now
        if now - saved > save_every or training.step == stop:
            training.save(checkpoint)
            saved = now


def _progress(recent: Sequence[Progress], stop: int, tokens_per_step: int) -> str:
    loss = sum(progress.loss for progress in recent) / len(recent)
    seconds = sum(progress.seconds for progress in recent) / len(recent)
    remaining = (stop - recent[-1].step) * seconds / 60
    speed = f"{tokens_per_step / seconds:,.0f} tokens/s  " if tokens_per_step else ""
    return f"step {recent[-1].step:5d}/{stop}  loss {loss:.5f}  {speed}{remaining:.1f} min left"
