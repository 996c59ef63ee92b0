"""Trains heads on hidden rows: loss, schedule, checkpoints. A run is a function of recipe and rows."""

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lorikeet.adapters.medusa.format import HeadsShape
from lorikeet.adapters.medusa.hidden import NOTHING, HiddenFiles, Shard
from lorikeet.adapters.medusa.model import MedusaHeads, OutputHead
from lorikeet.adapters.medusa.target import Target

LOGITS_AT_ONCE = {"cpu": 2**20, "cuda": 2**25}
"""Logits computed at a time, for any step size: as many as fit in a cache, or keep a GPU busy."""


@dataclass(frozen=True)
class HeadsRecipe:
    """Everything that the heads depend on, except the rows."""

    num_heads: int = 3
    num_layers: int = 1
    epochs: int = 4
    rows_per_step: int = 1024
    lr: float = 1e-3
    warmup: float = 0.1
    """Share of the steps during which the learning rate rises; then it falls along a cosine to zero."""
    seed: int = 0
    bf16: bool = True
    """Whether matrix products use bfloat16."""

    def lr_at(self, step: int, num_steps: int) -> float:
        rising = max(1, int(self.warmup * num_steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, num_steps - rising)))


class _FrozenHeadLoss(torch.autograd.Function):
    """Cross entropy through a frozen output head, in pieces, so that the full logits never exist.

    Semantics: sum over rows of cross_entropy(output_head(row), label), rows labelled NOTHING left out.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, labels: Tensor, output_head: OutputHead, vocab_size: int, bf16: bool) -> Tensor:
        """`rows` [S, H], `labels` [S]."""
        gradient = torch.empty_like(rows)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        for start in range(0, len(rows), piece := max(1, LOGITS_AT_ONCE.get(rows.device.type, 2**24) // vocab_size)):
            chosen = slice(start, start + piece)
            with torch.enable_grad():
                part = rows[chosen].detach().requires_grad_()
                with torch.autocast(rows.device.type, torch.bfloat16, enabled=bf16):
                    logits = output_head(part).float()
                loss = cross_entropy(logits, labels[chosen], ignore_index=NOTHING, reduction="sum")
            (gradient[chosen],) = torch.autograd.grad(loss, part)
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0], None, None, None, None


class HeadsOptimizer:
    """Heads in training, and their optimizer."""

    def __init__(self, heads: MedusaHeads, recipe: HeadsRecipe, output_head: OutputHead, vocab_size: int) -> None:
        """`output_head`: of the target, with what follows it."""
        self.heads, self.recipe = heads, recipe
        self.output = output_head, vocab_size
        """Rows to logits of the labels, and how many labels there are."""
        self.state = torch.optim.AdamW(heads.parameters(), lr=recipe.lr, weight_decay=0.0)

    def take(self, rows: Tensor, labels: Tensor, lr: float) -> float:
        """One step on `rows` [S, H] and `labels` [S, heads]; returns its loss in nats per prediction."""
        for group in self.state.param_groups:
            group["lr"] = lr
        loss = self.loss(rows, labels)
        loss.backward()
        self.state.step()
        self.state.zero_grad(set_to_none=True)
        return loss.item()

    def loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Mean over rows of the sum over heads, divided by heads."""
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.recipe.bf16):
            ahead = self.heads(rows.float()).flatten(0, 1)
        total: Tensor = _FrozenHeadLoss.apply(ahead.float(), labels.flatten(), *self.output, self.recipe.bf16)
        return total / max(1, int((labels != NOTHING).sum()))


class HeadsTrainer:
    """The heads, their optimizer and the number of steps done."""

    def __init__(self, recipe: HeadsRecipe, files: HiddenFiles, target: Target) -> None:
        self.recipe = recipe
        self.heads = MedusaHeads(HeadsShape(recipe.num_heads, recipe.num_layers, target.hidden_size))
        self.heads.to(target.place.device)
        self.step = 0
        self._files, self._device = files, target.place.device
        self._optimizer = HeadsOptimizer(self.heads, recipe, target.logits, target.vocab_size)
        per_epoch = sum(math.ceil(rows / recipe.rows_per_step) for rows in files.num_rows)
        self.num_steps = recipe.epochs * per_epoch

    def run(self) -> Iterator[float]:
        """Run the remaining steps; yields each step's loss in nats per prediction."""
        for rows, labels in self._batches(self.step):
            loss = self._optimizer.take(rows, labels, self.recipe.lr_at(self.step, self.num_steps))
            self.step += 1
            yield loss

    def _batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and labels of step `start` and all later ones. One shard is in memory at a time."""
        step, size = 0, self.recipe.rows_per_step
        held: tuple[int, Shard, Tensor] | None = None
        for epoch in range(self.recipe.epochs):
            for number in _shuffled(len(self._files.num_rows), self.recipe.seed, epoch, "shards").tolist():
                num_batches = math.ceil(self._files.num_rows[number] / size)
                if step + num_batches <= start:
                    step += num_batches
                    continue
                if held is None or held[0] != number:
                    shard = self._files.load(number, self._device)
                    held = number, shard, shard.labels(self.recipe.num_heads)
                order = _shuffled(self._files.num_rows[number], self.recipe.seed, epoch, f"rows {number}")
                for batch in order.to(self._device).split(size):
                    if step >= start:
                        yield held[1].rows[batch], held[2][batch]
                    step += 1

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """The file appears complete or not at all."""
        state = {
            "settings": settings,
            "recipe": asdict(self.recipe),
            "step": self.step,
            "heads": self.heads.state_dict(),
            "optimizer": self._optimizer.state.state_dict(),
        }
        scratch = path.with_suffix(".part")
        torch.save(state, scratch)
        os.replace(scratch, path)

    def resume(self, path: Path, settings: dict[str, Any]) -> bool:
        """Resume from a checkpoint of the same recipe and rows; returns False for others."""
        state: dict[str, Any] = torch.load(path, map_location=self._device, weights_only=True)
        if state["recipe"] != asdict(self.recipe) or state["settings"] != settings:
            return False
        self.heads.load_state_dict(state["heads"])
        self._optimizer.state.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return True


def _shuffled(count: int, seed: int, epoch: int, what: str) -> Tensor:
    """0 … count − 1 in an order that depends only on seed, epoch and name."""
    hashed = hashlib.sha256(f"{seed} {epoch} {what}".encode()).digest()
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(hashed[:7], "big")))
