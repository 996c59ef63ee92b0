"""Distilling moves a draft towards its base; resumed or repeated it ends with the same weights. On toy models."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from lorikeet.demo.data.mixture import Tokens
from lorikeet.demo.evaluation.draft import agreement
from lorikeet.demo.training import distill, teacher
from lorikeet.demo.training.distill import (
    INITIAL_SCALE,
    Distiller,
    DraftRecipe,
    EmbeddingLoss,
    draft_config,
    initial_embedding,
)
from lorikeet.demo.training.model import base_config
from lorikeet.demo.training.teacher import SketchFile, sketch
from lorikeet.demo.training.trainer import digest

ROW_LEN, NUM_ROWS, VOCABULARY = 32, 16, 96
RECIPE = DraftRecipe(
    cycles=(24,), tokens_per_step=64, stages=((0.0, 16), (0.5, 32)), warmup_steps=2, overlap_from=0.5, bf16=False
)
TOY = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    for module in (teacher, distill):
        monkeypatch.setattr(module, "ROW_LEN", ROW_LEN)
    torch.manual_seed(0)
    base = LlamaForCausalLM(base_config(**(TOY | {"hidden_size": 32})))
    base.lm_head.weight.data.mul_(30)  # a distribution worth learning
    return base.eval()


@pytest.fixture
def rows() -> Tokens:
    return np.random.default_rng(0).integers(0, VOCABULARY, (NUM_ROWS, ROW_LEN)).astype(np.uint16)


@pytest.fixture
def sketches(base: LlamaForCausalLM, rows: Tokens, tmp_path: Path) -> SketchFile:
    sketches = SketchFile(tmp_path / "sketches", NUM_ROWS)
    list(sketches.fill(base, rows, seed=0))
    return sketches


def toy_distiller(rows: Tokens, sketches: SketchFile, recipe: DraftRecipe = RECIPE, seed: int = 0) -> Distiller:
    torch.manual_seed(seed)
    return Distiller(LlamaForCausalLM(draft_config(**TOY)), rows, sketches, recipe, seed)


def test_the_draft_has_at_most_a_tenth_of_the_parameters() -> None:
    with torch.device("meta"):
        base, draft = LlamaForCausalLM(base_config()), LlamaForCausalLM(draft_config())
    assert draft.num_parameters() <= base.num_parameters() // 10
    assert draft.config.vocab_size == base.config.vocab_size


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_loss_and_gradients_match_full_distributions(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd on full distributions, so sketches are averaged over many copies of two positions."""
    monkeypatch.setattr(distill, "PIECE_LEN", 3000)
    generator = torch.Generator().manual_seed(0)
    logits, hidden, table = (
        2 * torch.randn(shape, generator=generator) for shape in ((2, VOCABULARY), (2, 8), (96, 8))
    )
    hidden.requires_grad_()
    table.requires_grad_()
    copies = 8000
    sketches = sketch(logits.repeat(copies, 1), generator)
    found = EmbeddingLoss.apply(hidden.repeat(copies, 1), table, sketches, share, 3.0, torch.float32)
    found_gradients = torch.autograd.grad(found, (hidden, table))
    log_p, log_q = logits.log_softmax(-1), (hidden @ table.T).log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    expected = (1 - share) * divergence + 3 * share * (1 - torch.minimum(log_p, log_q).exp().sum(-1).mean())
    assert found.item() == pytest.approx(expected.item(), rel=0.02)
    for gradient, wanted in zip(found_gradients, torch.autograd.grad(expected, (hidden, table)), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())


def test_the_loss_is_zero_for_equal_distributions() -> None:
    hidden, table = torch.randn(50, 8), torch.randn(VOCABULARY, 8)
    sketches = sketch(hidden @ table.T, torch.Generator().manual_seed(1))
    for share in (0.0, 1.0):
        loss = EmbeddingLoss.apply(hidden, table, sketches, share, 3.0, torch.float32)
        assert loss.item() == pytest.approx(0, abs=1e-5)


def test_distilling_raises_the_overlap(base: LlamaForCausalLM, rows: Tokens, sketches: SketchFile) -> None:
    distiller = toy_distiller(rows, sketches, replace(RECIPE, cycles=(100,), matrix_lr=0.02, other_lr=0.02))
    token_ids = torch.from_numpy(rows.astype(np.int64))

    def overlap() -> float:
        with torch.inference_mode():
            return agreement(base(token_ids).logits, distiller.model(token_ids).logits).overlap.mean().item()

    before = overlap()
    for _ in range(100):
        distiller.run_step()
    assert overlap() > before + 0.15


def test_every_epoch_reads_each_sequence_once(rows: Tokens, sketches: SketchFile) -> None:
    distiller = toy_distiller(rows, sketches)
    steps_per_epoch = NUM_ROWS * ROW_LEN // RECIPE.tokens_per_step
    seen = []
    for step in range(steps_per_epoch):
        distiller.step = step
        seen += distiller._spans()
    assert sorted(seen) == [(row, at, at + 16) for row in range(NUM_ROWS) for at in (0, 16)]
    distiller.step = 20
    assert {stop - start for _, start, stop in distiller._spans()} == {32}


def test_the_same_seed_gives_the_same_weights_also_when_resumed(
    rows: Tokens, sketches: SketchFile, tmp_path: Path
) -> None:
    whole, other = toy_distiller(rows, sketches), toy_distiller(rows, sketches, seed=1)
    for _ in range(RECIPE.num_steps):
        whole.run_step()
        other.run_step()
    first = toy_distiller(rows, sketches)
    for _ in range(15):
        first.run_step()
    first.save(tmp_path / "checkpoint.pt")
    second = toy_distiller(rows, sketches)
    second.resume(tmp_path / "checkpoint.pt")
    for _ in range(RECIPE.num_steps - 15):
        second.run_step()
    assert digest(second.model) == digest(whole.model) != digest(other.model)
    with pytest.raises(ValueError, match="another recipe"):
        toy_distiller(rows, sketches, replace(RECIPE, overlap_weight=1.0)).resume(tmp_path / "checkpoint.pt")


def test_the_loss_changes_from_divergence_to_overlap() -> None:
    recipe = DraftRecipe(cycles=(1000,), overlap_from=0.6)
    assert recipe.overlap_share(600) == 0.0
    assert recipe.overlap_share(625) == pytest.approx(0.5)
    assert recipe.overlap_share(650) == recipe.overlap_share(999) == 1.0


def test_later_cycles_train_the_overlap_only() -> None:
    recipe = DraftRecipe(cycles=(1000, 200), warmup_steps=10, polish_lr=0.3)
    assert recipe.lr_factor(999) < 0.01
    assert recipe.lr_factor(1009) == pytest.approx(0.3 * (1 - 9 / 200))
    assert recipe.lr_factor(1100) == pytest.approx(0.15)
    assert recipe.overlap_share(1000) == 1.0
    assert (recipe.sequence_len(0), recipe.sequence_len(1000)) == (256, 1024)


def test_a_full_initial_embedding_gives_the_bases_distributions(base: LlamaForCausalLM, rows: Tokens) -> None:
    """In the span of the hidden states it is a change of basis: the Gram matrix of centred logits stays what it was."""
    table = initial_embedding(base, rows, 32) / INITIAL_SCALE
    with torch.inference_mode():
        hidden = base.model(torch.from_numpy(rows.astype(np.int64))).last_hidden_state.flatten(0, 1)
        logits = hidden @ base.lm_head.weight.T
    centred = logits - (logits.softmax(-1).mean(0) @ logits.T)[:, None]
    torch.testing.assert_close(table @ table.T, centred.T @ centred / len(centred), rtol=1e-3, atol=1e-2)
