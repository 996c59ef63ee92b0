"""The draft model: its shape, its initialization, and its distillation from the base's next-token distributions.

At temperature 1 a server accepts the overlap Σ min(p, q) of the base's distribution p with the draft's q. So the loss
is the Kullback-Leibler divergence at first, which has a gradient everywhere, and one minus the overlap at the end.
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
from lorikeet.demo.training.trainer import Recipe, TrainingRun

DRAFT_FOLDER = Path(__file__).parents[1] / "draft"
PIECE_LEN = 128
"""Positions whose logits are computed at a time on a CPU."""
INITIAL_SCALE = 0.3
"""Scale of the initial embedding: at full scale every token would predict itself."""
SMALLEST = 1e-7
"""Lower bound of probabilities in divisions; float16 has no smaller value."""


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
    """The trainer's recipe with other lengths, and the parameters of the loss."""

    cycles: tuple[int, ...] = (13_000, 3_000)
    stages: tuple[tuple[float, int], ...] = ((0.0, 256), (0.6, 512), (0.85, 1024))
    decay_from: float = 0.45
    other_lr: float = 0.008
    overlap_from: float = 0.6
    """From this share of the cycle on, 1 − overlap replaces the divergence, gradually over a twentieth of the cycle."""
    overlap_weight: float = 3.0
    """Weight of 1 − overlap in the loss: its gradients are smaller than those of the divergence."""
    polish_lr: float = 0.3
    """Initial share of the learning rates in later cycles, which train the overlap on rows of full length."""

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
    """The distance of the distributions of hidden states [N, H] and embedding [V, H] from the base's.

    (1 - share) · KL(p ‖ q) + share · weight · (1 - Σ min(p, q)), the mean over positions. Logits and their gradients
    are computed a few positions at a time: all logits of a step would be far larger than a cache.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, embedding: Tensor, sketch: Sketch, share: float, weight: float, dtype: torch.dtype
    ) -> Tensor:
        table, hidden = embedding.to(dtype), hidden.to(dtype)
        hidden_gradient, embedding_gradient = torch.empty_like(hidden), torch.zeros_like(embedding)
        total = torch.zeros((), device=hidden.device)
        log_p, weights = sketch.probabilities.clamp(min=SMALLEST).log(), sketch.weights()
        size = PIECE_LEN if hidden.device.type == "cpu" else len(hidden)
        for piece in (slice(start, start + size) for start in range(0, len(hidden), size)):
            token_ids, w = sketch.token_ids[piece], weights[piece]
            log_q = (hidden[piece] @ table.T).float().log_softmax(-1)
            log_ratio = log_q.gather(1, token_ids) - log_p[piece]
            ratio = log_ratio.exp()
            total += (w * (share * weight * (1 - ratio.clamp(max=1.0)) - (1 - share) * log_ratio)).sum()
            pull = w * (1 - share + share * weight * ratio * (ratio < 1))
            # the gradient of the logits: q · the sum of all pulls, minus each pull at its token
            logit_gradient = log_q.exp_().mul_(pull.sum(-1, keepdim=True)).scatter_add_(1, token_ids, -pull).to(dtype)
            hidden_gradient[piece] = logit_gradient @ table
            embedding_gradient += logit_gradient.T @ hidden[piece]
        ctx.save_for_backward(hidden_gradient / len(hidden), embedding_gradient / len(hidden))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, embedding_gradient = ctx.saved_tensors
        return hidden_gradient * gradients[0], embedding_gradient * gradients[0], None, None, None, None


class Distiller(TrainingRun):
    """Trains a draft on rows of tokens and the base's sketches of them, for any number of epochs."""

    def __init__(self, draft: LlamaForCausalLM, rows: Tokens, sketches: SketchFile, recipe: DraftRecipe, seed: int):
        """rows are [R, ROW_LEN]."""
        super().__init__(draft, recipe)
        self._recipe, self._rows, self._sketches, self._seed = recipe, rows, sketches, seed
        self._order: list[tuple[int, int, int]] = []
        self._order_key = (-1, -1)

    def next_loss(self) -> Tensor:
        recipe, spans = self._recipe, self._spans()
        rows = np.stack([self._rows[row, start:stop] for row, start, stop in spans]).astype(np.int64)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.bf16):
            hidden = self.model.model(torch.from_numpy(rows).to(self.device), use_cache=False).last_hidden_state
        embedding = self.model.get_input_embeddings().weight
        sketch = self._sketches.read(spans, self.device)
        dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        loss: Tensor = EmbeddingLoss.apply(
            hidden.flatten(0, 1), embedding, sketch, recipe.overlap_share(self.step), recipe.overlap_weight, dtype
        )
        return loss

    def _spans(self) -> list[tuple[int, int, int]]:
        """(row, start, stop) of each sequence of this step; every epoch reads all of them in another order."""
        recipe = self._recipe
        length = recipe.sequence_len(self.step)
        epoch, place = divmod(self.step, self._rows.size // recipe.tokens_per_step)
        if (epoch, length) != self._order_key:
            order = [
                (row, start, start + length) for row in range(len(self._rows)) for start in range(0, ROW_LEN, length)
            ]
            random.Random(f"{self._seed} {epoch} {length}").shuffle(order)
            self._order, self._order_key = order, (epoch, length)
        num_spans = recipe.tokens_per_step // length
        return self._order[place * num_spans : (place + 1) * num_spans]


@torch.inference_mode()
def initial_embedding(base: LlamaForCausalLM, rows: Tokens, hidden_size: int) -> Tensor:
    """[V, hidden_size]: the embedding with which hidden states of unit variance best approximate the base's logits.

    Best in the sum of squares over rows [R, L], each token weighted by its probability under the base. The result is
    scaled by INITIAL_SCALE.
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
