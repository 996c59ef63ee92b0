"""The draft model: its shape, where it starts from, and how it learns the base's laws of the next token.

Knows the trainer and the teacher's file, nothing of the command line. A draft is worth what a server accepts of it: at
temperature 1 that is the overlap Σ min(p, q) of the base's law p with the draft's q. So the loss is Kullback-Leibler
divergence at first, which has a gradient everywhere, and the lost overlap itself at the end.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lorikeet.demo.data.mixture import Tokens
from lorikeet.demo.training.model import base_config
from lorikeet.demo.training.teacher import ROW_LEN, Sketch, SketchFile
from lorikeet.demo.training.trainer import Recipe, Run

DRAFT_FOLDER = Path(__file__).parents[1] / "draft"
PIECE_LEN = 128
"""Positions whose logits are held at a time on a CPU."""
INITIAL_SCALE = 0.3
"""Of the embedding, whose rows in full length would have every token call for itself."""
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

    cycles: tuple[int, ...] = (13_000, 3_000)
    stages: tuple[tuple[float, int], ...] = ((0.0, 256), (0.6, 512), (0.85, 1024))
    decay_from: float = 0.45
    other_lr: float = 0.008
    overlap_from: float = 0.6
    """Share of the cycle from which on the lost overlap takes the place of the divergence, over a twentieth of it."""
    overlap_weight: float = 3.0
    """Of the lost overlap, whose gradients are smaller."""
    polish_lr: float = 0.3
    """Share of the learning rates from which a cycle after the first falls, on rows of full length, for the overlap."""

    def sequence_len(self, step: int) -> int:
        return self.stages[-1][1] if self._polishes(step) else super().sequence_len(step)

    def lr_factor(self, step: int) -> float:
        if not self._polishes(step):
            return super().lr_factor(step)
        place, cycle_len = self._place(step)
        return self.polish_lr * min((place + 1) / self.warmup_steps, 1 - place / cycle_len)

    def overlap_share(self, step: int) -> float:
        if self._polishes(step):
            return 1.0
        place, cycle_len = self._place(step)
        return min(1.0, max(0.0, 20 * (place / cycle_len - self.overlap_from)))

    def _polishes(self, step: int) -> bool:
        return step >= self.cycles[0]


class EmbeddingLoss(torch.autograd.Function):
    """What it costs to read hidden states [N, H] through the embedding [V, H] instead of the base's law there.

    (1 - share) · KL(p ‖ q) + share · weight · (1 - Σ min(p, q)), the mean over positions. Logits are made a few
    positions at a time, and their gradient at once with them: all logits of a step would be far larger than a cache.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, embedding: Tensor, laws: Sketch, share: float, weight: float, dtype: torch.dtype
    ) -> Tensor:
        table, hidden = embedding.to(dtype), hidden.to(dtype)
        hidden_gradient, embedding_gradient = torch.empty_like(hidden), torch.zeros_like(embedding)
        total = torch.zeros((), device=hidden.device)
        log_p, weights = laws.probabilities.clamp(min=SMALLEST).log(), laws.weights()
        size = PIECE_LEN if hidden.device.type == "cpu" else len(hidden)
        for piece in (slice(at, at + size) for at in range(0, len(hidden), size)):
            token_ids, w = laws.token_ids[piece], weights[piece]
            log_q = (hidden[piece] @ table.T).float().log_softmax(-1)
            log_ratio = log_q.gather(1, token_ids) - log_p[piece]
            ratio = log_ratio.exp()
            total += (w * (share * weight * (1 - ratio.clamp(max=1.0)) - (1 - share) * log_ratio)).sum()
            pull = w * (1 - share + share * weight * ratio * (ratio < 1))
            # q · the sum of all pulls, less each pull at its token: what the logits get.
            logit_gradient = log_q.exp_().mul_(pull.sum(-1, keepdim=True)).scatter_add_(1, token_ids, -pull).to(dtype)
            hidden_gradient[piece] = logit_gradient @ table
            embedding_gradient += logit_gradient.T @ hidden[piece]
        ctx.save_for_backward(hidden_gradient / len(hidden), embedding_gradient / len(hidden))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, embedding_gradient = ctx.saved_tensors
        return hidden_gradient * gradients[0], embedding_gradient * gradients[0], None, None, None, None


class Distiller(Run):
    """Trains a draft on rows of tokens and the base's laws along them, any number of times over."""

    def __init__(self, draft: LlamaForCausalLM, rows: Tokens, laws: SketchFile, recipe: DraftRecipe, seed: int) -> None:
        """rows are [R, ROW_LEN]."""
        super().__init__(draft, recipe)
        self._recipe, self._rows, self._laws, self._seed = recipe, rows, laws, seed
        self._order: list[tuple[int, int, int]] = []
        self._order_key = (-1, -1)

    def next_loss(self) -> Tensor:
        recipe, spans = self._recipe, self._spans()
        rows = np.stack([self._rows[row, start:stop] for row, start, stop in spans]).astype(np.int64)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.bf16):
            hidden = self.model.model(torch.from_numpy(rows).to(self.device), use_cache=False).last_hidden_state
        embedding = self.model.get_input_embeddings().weight
        laws = self._laws.read(spans, self.device)
        dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        loss: Tensor = EmbeddingLoss.apply(
            hidden.flatten(0, 1), embedding, laws, recipe.overlap_share(self.step), recipe.overlap_weight, dtype
        )
        return loss

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


@torch.inference_mode()
def initial_embedding(base: LlamaForCausalLM, rows: Tokens, hidden_size: int) -> Tensor:
    """[V, hidden_size]: the embedding through which hidden states of unit variance best give the base's logits.

    Best in the sum of squares over rows [R, L], each token weighed by how likely the base finds it. INITIAL_SCALE of
    that is what is given.
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
    return INITIAL_SCALE * centred @ directions.T
