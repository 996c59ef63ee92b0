"""The draft model: its shape, where it starts from, and how it learns the base's laws of the next token.

Knows the trainer and the teacher's file, nothing of the command line. A draft is worth what a server accepts of it: at
temperature 1 that is the overlap Σ min(p, q) of the base's law p with the draft's q. So the loss is Kullback-Leibler
divergence at first, which has a gradient everywhere, and the lost overlap itself at the end.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from demo.mixture import Tokens
from demo.model import base_config
from demo.teacher import ROW_LEN, Sketch, SketchFile
from demo.trainer import Recipe, Run

DRAFT_FOLDER = Path(__file__).parent / "draft"
SMALLEST = 1e-7
"""Probabilities below it are taken for it where they are divided by; float16 has nothing smaller."""


def draft_config(**overrides: int) -> LlamaConfig:
    """At most a tenth of the base's parameters, most of them in the embedding."""
    settings = {
        "hidden_size": 80,
        "intermediate_size": 208,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 40,
    }
    return base_config(**(settings | overrides))


@dataclass(frozen=True)
class DraftRecipe(Recipe):
    """The trainer's recipe, with other lengths, and what the loss is made of."""

    cycles: tuple[int, ...] = (10_000,)
    stages: tuple[tuple[float, int], ...] = ((0.0, 256), (0.6, 512), (0.85, 1024))
    decay_from: float = 0.3
    overlap_from: float = 0.6
    """Share of the cycle from which on the lost overlap takes the place of the divergence, over a twentieth of it."""
    overlap_weight: float = 3.0
    """Of the lost overlap, whose gradients are smaller."""

    def overlap_share(self, step: int) -> float:
        place, cycle_len = self._place(step)
        return min(1.0, max(0.0, 20 * (place / cycle_len - self.overlap_from)))


def divergence_and_overlap(logits: Tensor, sketch: Sketch) -> tuple[Tensor, Tensor]:
    """Means over positions of KL(p ‖ q) and of Σ min(p, q), p the sketched law, q that of the logits [N, V]."""
    logits = logits.float()
    log_q = logits.gather(1, sketch.token_ids) - logits.logsumexp(-1, keepdim=True)
    log_ratio = log_q - sketch.probabilities.clamp(min=SMALLEST).log()
    weights = sketch.weights()
    divergence = -(weights * log_ratio).sum(-1).mean()
    overlap = (weights * log_ratio.exp().clamp(max=1.0)).sum(-1).mean()
    return divergence, overlap


class Distiller(Run):
    """Trains a draft on rows of tokens and the base's laws along them, any number of times over."""

    def __init__(
        self,
        draft: LlamaForCausalLM,
        rows: Tokens,
        laws: SketchFile,
        recipe: DraftRecipe,
        seed: int,
        compile_model: bool = False,
    ) -> None:
        """rows are [R, ROW_LEN]."""
        super().__init__(draft, recipe)
        self._recipe, self._rows, self._laws, self._seed = recipe, rows, laws, seed
        self._loss: Callable[..., Tensor] = (
            torch.compile(self._plain_loss, dynamic=False) if compile_model else self._plain_loss
        )
        self._order: list[tuple[int, int, int]] = []
        self._order_key = (-1, -1)

    def next_loss(self) -> Tensor:
        spans = self._spans()
        token_ids = np.stack([self._rows[row, start:stop] for row, start, stop in spans]).astype(np.int64)
        sketch = self._laws.read(spans, self.device)
        share = torch.tensor(self._recipe.overlap_share(self.step), device=self.device)
        return self._loss(torch.from_numpy(token_ids).to(self.device), sketch.token_ids, sketch.probabilities, share)

    def _spans(self) -> list[tuple[int, int, int]]:
        """(row, start, stop) of each sequence of this step; every epoch reads all of them in an order of its own."""
        recipe = self._recipe
        length = recipe.sequence_len(self.step)
        epoch, place = divmod(self.step, self._rows.size // recipe.tokens_per_step)
        if (epoch, length) != self._order_key:
            order = [(row, at, at + length) for row in range(len(self._rows)) for at in range(0, ROW_LEN, length)]
            random.Random(f"{self._seed} {epoch} {length}").shuffle(order)
            self._order, self._order_key = order, (epoch, length)
        num_spans = recipe.tokens_per_step // length
        return self._order[place * num_spans : (place + 1) * num_spans]

    def _plain_loss(self, token_ids: Tensor, sketch_ids: Tensor, probabilities: Tensor, share: Tensor) -> Tensor:
        """token_ids are [sequences, sequence length], the sketch's parts [sequences · length, K]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bf16):
            logits = self.model(token_ids, use_cache=False).logits.flatten(0, 1)
        divergence, overlap = divergence_and_overlap(logits, Sketch(sketch_ids, probabilities))
        return (1 - share) * divergence + share * self._recipe.overlap_weight * (1 - overlap)


@torch.inference_mode()
def initial_embedding(base: LlamaForCausalLM, rows: Tokens, hidden_size: int) -> Tensor:
    """[V, hidden_size]: the embedding through which a draft's unit-variance hidden states best give the base's logits.

    Best in the sum of squares over rows [R, L], each token weighed by how likely the base finds it.
    """
    table = base.lm_head.weight.float()
    second_moment = torch.zeros(table.shape[1], table.shape[1], device=table.device)
    likely = torch.zeros(len(table), device=table.device)
    for row in rows:
        token_ids = torch.from_numpy(row[None].astype(np.int64)).to(base.device)
        hidden = base.model(token_ids, use_cache=False).last_hidden_state[0].float()
        second_moment += hidden.T @ hidden / rows.size
        likely += (hidden @ table.T).softmax(-1).sum(0) / rows.size
    values, vectors = torch.linalg.eigh(second_moment)
    centred = (table - likely @ table) @ (vectors * values.clamp(min=0).sqrt())
    directions = torch.linalg.svd(centred * likely.sqrt()[:, None], full_matrices=False).Vh[:hidden_size]
    return centred @ directions.T
