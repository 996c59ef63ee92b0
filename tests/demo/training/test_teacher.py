"""Sketches give unbiased means over full distributions; their file is the same after any number of interruptions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from lorikeet.demo.training import teacher
from lorikeet.demo.training.model import base_config
from lorikeet.demo.training.teacher import NUM_LIKELIEST, SketchFile, sketch

NUM_ROWS = 10


def test_a_sketch_estimates_a_mean_over_the_full_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 300, generator=generator)
    values = torch.rand(300, generator=generator)
    found = sketch(logits.expand(2000, -1), generator)
    estimates = (found.weights() * values[found.token_ids]).sum(-1)
    exact = (logits[0].softmax(-1) * values).sum()
    assert estimates.mean().item() == pytest.approx(exact.item(), abs=4 * estimates.std().item() / 2000**0.5)
    assert estimates.std() > 0


def test_a_sketch_has_the_most_likely_tokens_first_and_samples_from_the_rest() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    found = sketch(logits, torch.Generator().manual_seed(2))
    probs = logits.softmax(-1)
    assert torch.equal(found.probabilities, probs.gather(1, found.token_ids))
    assert torch.equal(found.token_ids[:, :NUM_LIKELIEST], probs.topk(NUM_LIKELIEST).indices)
    for likeliest, drawn in zip(found.token_ids[:, :NUM_LIKELIEST], found.token_ids[:, NUM_LIKELIEST:], strict=True):
        assert not set(likeliest.tolist()) & set(drawn.tolist())


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    monkeypatch.setattr(teacher, "ROW_LEN", 8)
    monkeypatch.setattr(teacher, "CHUNK_ROWS", 4)
    torch.manual_seed(0)
    return LlamaForCausalLM(base_config(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1))


def test_an_interrupted_file_is_completed_identically(base: LlamaForCausalLM, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 128, (NUM_ROWS, 8)).astype(np.uint16)
    whole = SketchFile(tmp_path / "whole", NUM_ROWS)
    assert list(whole.fill(base, rows, seed=3)) == [4, 8, 10]
    first = SketchFile(tmp_path / "parts", NUM_ROWS)
    assert next(first.fill(base, rows, seed=3)) == 4
    second = SketchFile(tmp_path / "parts", NUM_ROWS)
    assert list(second.fill(base, rows, seed=3)) == [8, 10]
    spans = [(row, 2, 7) for row in range(NUM_ROWS)]
    device = torch.device("cpu")
    assert torch.equal(whole.read(spans, device).token_ids, second.read(spans, device).token_ids)
    assert torch.equal(whole.read(spans, device).probabilities, second.read(spans, device).probabilities)
    other = SketchFile(tmp_path / "other", NUM_ROWS)
    list(other.fill(base, rows, seed=4))
    assert not torch.equal(whole.read(spans, device).token_ids, other.read(spans, device).token_ids)


def test_sketches_read_back_equal_the_bases_probabilities(base: LlamaForCausalLM, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 128, (NUM_ROWS, 8)).astype(np.uint16)
    sketches = SketchFile(tmp_path, NUM_ROWS)
    list(sketches.fill(base, rows, seed=0))
    found = sketches.read([(9, 3, 5), (0, 0, 1)], torch.device("cpu"))
    with torch.inference_mode():
        probs = base(torch.from_numpy(rows[[9, 0]].astype(np.int64))).logits.softmax(-1)
    expected = torch.stack([probs[0, 3], probs[0, 4], probs[1, 0]]).gather(1, found.token_ids)
    torch.testing.assert_close(found.probabilities, expected, rtol=2e-3, atol=1e-6)


def test_a_file_of_another_size_is_refused(base: LlamaForCausalLM, tmp_path: Path) -> None:
    SketchFile(tmp_path, NUM_ROWS)
    with pytest.raises(ValueError, match="belongs to another run"):
        SketchFile(tmp_path, NUM_ROWS + 1)
