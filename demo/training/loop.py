"""Runs a training to some step, prints its progress and saves checkpoints."""

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lorikeet.demo.training.trainer import Progress

PRINT_EVERY = 10.0
"""Seconds."""


class Training(Protocol):
    """A training that runs step by step."""

    step: int

    def run_step(self) -> Progress: ...

    def save(self, path: Path) -> None: ...

    def resume(self, path: Path) -> None: ...


def complete(
    training: Training, num_steps: int, checkpoint: Path, options: Namespace, name: str = "", tokens_per_step: int = 0
) -> bool:
    """Resume from the checkpoint, if any, and run to the end or to `--stop-after`; whether the training is complete."""
    prefix = f"{name}: " if name else ""
    if checkpoint.exists():
        training.resume(checkpoint)
        print(f"{prefix}resuming after step {training.step}", flush=True)
    stop = min(num_steps, options.stop_after or num_steps)
    minutes = options.checkpoint_minutes
    run_until(stop, training, checkpoint, minutes * 60, name=name, tokens_per_step=tokens_per_step)
    if stop < num_steps:
        print(f"{prefix}stopped after step {stop}; the same command without --stop-after continues", flush=True)
    return stop == num_steps


def run_until(
    stop: int, training: Training, checkpoint: Path, save_every: float, *, name: str = "", tokens_per_step: int = 0
) -> None:
    """`save_every` is in seconds; the last checkpoint is of step `stop`. Lines start with the name, and include tokens
    per second if the tokens of a step are known."""
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
