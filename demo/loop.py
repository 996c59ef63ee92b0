"""Runs a training to some step: prints how it goes and leaves checkpoints. Knows nothing of what is trained."""

import time
from collections.abc import Sequence
from pathlib import Path

from demo.trainer import Progress, Recipe, Run

PRINT_EVERY = 10.0
"""Seconds."""


def run_until(stop: int, training: Run, checkpoint: Path, save_every: float) -> None:
    """save_every in seconds; the last checkpoint is of step `stop`."""
    saved = printed = time.monotonic()
    recent: list[Progress] = []
    while training.step < stop:
        recent.append(training.run_step())
        now = time.monotonic()
        if now - printed > PRINT_EVERY or training.step == stop:
            print(_progress_line(recent, stop, training.recipe), flush=True)
            recent, printed = [], now
        if now - saved > save_every or training.step == stop:
            training.save(checkpoint)
            saved = now


def _progress_line(recent: Sequence[Progress], stop: int, recipe: Recipe) -> str:
    loss = sum(progress.loss for progress in recent) / len(recent)
    seconds = sum(progress.seconds for progress in recent) / len(recent)
    remaining = (stop - recent[-1].step) * seconds / 60
    return (
        f"step {recent[-1].step:5d}/{stop}  loss {loss:.4f}  "
        f"{recipe.tokens_per_step / seconds:,.0f} tokens/s  {remaining:.1f} min left"
    )
