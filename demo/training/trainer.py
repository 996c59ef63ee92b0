"""One training run: optimizers, schedule, checkpoints and the step.

A run is a function of its recipe and its tokens: stopped anywhere and resumed, it ends with the same weights.
"""

import hashlib
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from lorikeet.demo.data.mixture import TokenStream

WINDOW_STEPS = 64
"""Steps that share one part of the stream, whose rows are shuffled."""


@dataclass(frozen=True)
class Recipe:
    """Everything that the weights depend on, except the stream and the initial weights."""

    cycles: tuple[int, ...] = (4000,)
    """Steps of each cycle. Each repeats stages and schedule from the weights of the previous one, so that a
    finished run can continue."""
    tokens_per_step: int = 4096
    stages: tuple[tuple[float, int], ...] = ((0.0, 256), (0.5, 512), (0.8, 1024), (0.95, 2048))
    """(from this share of the cycle on, sequence length): short rows are cheap, long ones train long contexts."""
    warmup_steps: int = 50
    decay_from: float = 0.4
    """Share of the cycle after which the learning rates fall linearly to zero."""
    matrix_lr: float = 0.03
    """Muon's, for the matrices of the layers."""
    other_lr: float = 0.004
    """AdamW's, for embeddings and norms."""
    matrix_decay: float = 0.1
    bf16: bool = True

    def sequence_len(self, step: int) -> int:
        place, cycle_len = self._place(step)
        return [length for share, length in self.stages if place >= share * cycle_len][-1]

    def lr_factor(self, step: int) -> float:
        place, cycle_len = self._place(step)
        remaining = (cycle_len - place) / (cycle_len * (1 - self.decay_from))
        return min(1.0, (place + 1) / self.warmup_steps, remaining)

    @property
    def num_steps(self) -> int:
        return sum(self.cycles)

    def _place(self, step: int) -> tuple[int, int]:
        """How many steps of its cycle came before this one, and how many the cycle has."""
        for cycle_len in self.cycles:
            if step < cycle_len:
                return step, cycle_len
            step -= cycle_len
        raise ValueError(f"the recipe ends {step} steps before this one")


@dataclass(frozen=True)
class Progress:
    """The progress after one step."""

    step: int
    loss: float
    seconds: float


class TrainingRun(ABC):
    """The model, its two optimizers and the number of steps done."""

    def __init__(self, model: LlamaForCausalLM, recipe: Recipe) -> None:
        self.model = model.train()
        self.recipe = recipe
        self.step = 0
        self.device = next(model.parameters()).device
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in model.named_parameters():
            (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.matrix_decay), recipe.matrix_lr),
            (torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0), recipe.other_lr),
        ]

    def run_step(self) -> Progress:
        started = time.monotonic()
        for optimizer, lr in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * self.recipe.lr_factor(self.step)
        loss = self.next_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return Progress(self.step, loss.item(), time.monotonic() - started)

    @abstractmethod
    def next_loss(self) -> Tensor:
        """The loss of step `step`."""

    def save(self, path: Path) -> None:
        """The file appears complete or not at all, so a run killed while saving resumes from the one before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
        }
        scratch = path.with_suffix(".part")
        torch.save(state, scratch)
        os.replace(scratch, path)

    def resume(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        _check_same_start(type(self.recipe)(**state["recipe"]), self.recipe, state["step"])
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]


class DemoTrainer(TrainingRun):
    """Trains on the next token of a stream."""

    def __init__(
        self, model: LlamaForCausalLM, stream: TokenStream, recipe: Recipe, compile_model: bool = False
    ) -> None:
        super().__init__(model, recipe)
        self.stream = stream
        self._loss: Callable[[Tensor], Tensor] = torch.compile(self._plain_loss) if compile_model else self._plain_loss

    def next_loss(self) -> Tensor:
        return self._loss(self._rows())

    def _rows(self) -> Tensor:
        """[sequences of the step, sequence length + 1]: each row and the token after it.

        Rows of one step come from anywhere in its window, so that pieces of one block are spread over several steps.
        """
        recipe = self.recipe
        length = recipe.sequence_len(self.step)
        window, place = divmod(self.step, WINDOW_STEPS)
        window_len = WINDOW_STEPS * recipe.tokens_per_step
        tokens = self.stream.read(window * window_len, window_len + 1)
        starts = list(range(0, window_len - length + 1, length))
        random.Random(f"{self.stream.seed} {window} {length}").shuffle(starts)
        num_rows = recipe.tokens_per_step // length
        chosen = starts[place * num_rows : (place + 1) * num_rows]
        rows = np.stack([tokens[start : start + length + 1] for start in chosen]).astype(np.int64)
        return torch.from_numpy(rows).to(self.device)

    def _plain_loss(self, rows: Tensor) -> Tensor:
        """Mean cross entropy in nats per token; rows are [sequences, sequence length + 1]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bf16):
            logits = self.model(rows[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def _check_same_start(saved: Recipe, recipe: Recipe, step: int) -> None:
    """A run with other cycles may continue a checkpoint only if both have the same steps so far."""
    if step > min(saved.num_steps, recipe.num_steps):
        raise ValueError(f"the checkpoint is of step {step}, the recipe has {recipe.num_steps}")
    same = asdict(saved) | {"cycles": ()} == asdict(recipe) | {"cycles": ()}
    alike = all(
        saved.lr_factor(s) == recipe.lr_factor(s) and saved.sequence_len(s) == recipe.sequence_len(s)
        for s in range(step)
    )
    if not (same and alike):
        raise ValueError(f"the checkpoint of step {step} belongs to another recipe: {saved}")


def digest(model: LlamaForCausalLM) -> str:
    """SHA-256 over all parameters, by name: equal runs have equal digests on one machine."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        total.update(name.encode())
        total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
