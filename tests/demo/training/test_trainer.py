"""Training is a function of seed and recipe: repeated or resumed, it ends with the same weights. On a toy model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from lorikeet.demo.data.mixture import TokenStream
from lorikeet.demo.training.model import base_config
from lorikeet.demo.training.trainer import DemoTrainer, Recipe, digest

RECIPE = Recipe(cycles=(8,), tokens_per_step=64, stages=((0.0, 16), (0.5, 32)), warmup_steps=2)


def toy_trainer(recipe: Recipe = RECIPE, seed: int = 0) -> DemoTrainer:
    torch.manual_seed(seed)
    config = base_config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    pieces = [np.arange(i, i + 30, dtype=np.uint16) for i in range(20)]
    return DemoTrainer(LlamaForCausalLM(config), TokenStream(pieces, seed=0), recipe)


def run(trainer: DemoTrainer, num_steps: int) -> list[float]:
    return [trainer.run_step().loss for _ in range(num_steps)]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    trainers = [toy_trainer(), toy_trainer(), toy_trainer(seed=1)]
    for trainer in trainers:
        run(trainer, 4)
    one, two, other = (digest(trainer.model) for trainer in trainers)
    assert one == two != other


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = toy_trainer()
    run(whole, RECIPE.num_steps)
    first = toy_trainer()
    run(first, 3)
    first.save(tmp_path / "checkpoint.pt")
    second = toy_trainer(seed=7)
    second.resume(tmp_path / "checkpoint.pt")
    assert second.step == 3
    run(second, RECIPE.num_steps - 3)
    assert digest(second.model) == digest(whole.model)


def test_a_run_may_be_extended_only_while_the_steps_are_the_same(tmp_path: Path) -> None:
    longer = replace(RECIPE, cycles=(16,))
    whole = toy_trainer(longer)
    run(whole, 16)
    shorter = toy_trainer()
    run(shorter, 3)
    shorter.save(tmp_path / "early.pt")
    resumed = toy_trainer(longer)
    resumed.resume(tmp_path / "early.pt")
    run(resumed, 13)
    assert digest(resumed.model) == digest(whole.model)
    run(shorter, 3)
    shorter.save(tmp_path / "late.pt")
    with pytest.raises(ValueError, match="another recipe"):
        toy_trainer(longer).resume(tmp_path / "late.pt")
    with pytest.raises(ValueError, match="another recipe"):
        toy_trainer(replace(RECIPE, matrix_lr=0.5)).resume(tmp_path / "early.pt")


def test_a_finished_run_continues_with_another_cycle(tmp_path: Path) -> None:
    two_cycles = replace(RECIPE, cycles=(8, 6))
    whole = toy_trainer(two_cycles)
    run(whole, 14)
    finished = toy_trainer()
    run(finished, 8)
    finished.save(tmp_path / "finished.pt")
    resumed = toy_trainer(two_cycles)
    resumed.resume(tmp_path / "finished.pt")
    run(resumed, 6)
    assert digest(resumed.model) == digest(whole.model) != digest(finished.model)
    with pytest.raises(ValueError, match="another recipe"):
        toy_trainer(replace(RECIPE, cycles=(14,))).resume(tmp_path / "finished.pt")
    with pytest.raises(ValueError, match="the recipe has 4"):
        toy_trainer(replace(RECIPE, cycles=(4,))).resume(tmp_path / "finished.pt")


def test_training_reduces_the_loss() -> None:
    losses = run(toy_trainer(Recipe(cycles=(60,), tokens_per_step=64, stages=((0.0, 16),), warmup_steps=2)), 60)
    assert losses[-1] < 0.6 * losses[0]


def test_the_schedule_warms_up_holds_and_falls_to_zero() -> None:
    recipe = Recipe(cycles=(100,), warmup_steps=10, decay_from=0.4)
    factors = [recipe.lr_factor(step) for step in range(100)]
    assert factors[0] == 0.1
    assert factors[10:40] == [1.0] * 30
    assert factors[40:] == sorted(factors[40:], reverse=True)
    assert 0 < factors[99] < 0.02
    assert [recipe.sequence_len(step) for step in (0, 49, 50, 80, 99)] == [256, 256, 512, 1024, 2048]
