"""Real models in every number format: the log likelihood of a text next to transformers in float32, greedy texts."""

from functools import cache
from pathlib import Path

import pytest
import torch

from lorikeet.shard.batch.inputs import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.system import comparison
from tests.real import likelihood, models
from tests.shard.engine.exactness import NEW_TOKENS, TIE, through_engine

pytestmark = pytest.mark.real

MOST = 0.01
"""Nats per token that a number format may cost."""
NUM_PROMPTS = 40
NUM_LOGITS = 64
BY_NAME = pytest.mark.parametrize("name", models.FILES)


@cache
def reference(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and the negative log likelihood of each but the first by transformers in float32."""
    folder = models.folder(name, "float32")
    ids = likelihood.token_ids(folder)
    return ids, likelihood.of_network(models.network(folder, "float32"), ids)


@BY_NAME
def test_every_token_is_as_likely_as_in_transformers(name: str) -> None:
    """In float32, also where the text is longer than Gemma's sliding window."""
    ids, expected = reference(name)
    actual = likelihood.of_model(models.folder(name, "float32"), ids, "float32", max_total_tokens=len(ids))
    assert len(ids) > 4 * 512
    assert float((actual - expected).abs().max()) <= 1e-3


@BY_NAME
def test_bfloat16_costs_little(name: str) -> None:
    ids, expected = reference(name)
    actual = likelihood.of_model(models.folder(name, "float32"), ids, "bfloat16", max_total_tokens=len(ids))
    assert float(actual.mean()) <= float(expected.mean()) + MOST


def test_float16_costs_little() -> None:
    ids, expected = reference("smollm2")
    actual = likelihood.of_model(models.folder("smollm2", "float32"), ids, "float16", max_total_tokens=len(ids))
    assert float(actual.mean()) <= float(expected.mean()) + MOST


def test_float16_is_refused_where_activations_overflow() -> None:
    config = ShardConfig("m", str(models.folder("gemma3", "float32")), "unix:/dev/null", dtype="float16")
    with pytest.raises(ValueError, match="cannot serve gemma3_text in float16: its activations exceed 65,504"):
        load_model(config)


def logits_of(folder: Path, ids: torch.Tensor, dtype: str, fusions: str) -> torch.Tensor:
    model = load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype=dtype, fusions=fusions))
    model.allocate_kv(-(-len(ids) // model.page_size))
    model.inputs.fill([Segment(0, len(ids), range(-(-len(ids) // model.page_size)))], ids, torch.arange(len(ids)))
    return model.forward().clone()


@BY_NAME
def test_fused_modules_are_as_near_to_float32_as_plain_ones(name: str) -> None:
    """In every column of logits."""
    folder = models.folder(name, "float32")
    ids = reference(name)[0][:NUM_LOGITS]
    exact = logits_of(folder, ids, "float32", "none")
    plain, fused = (
        comparison.channel_sizes(logits_of(folder, ids, "bfloat16", fusions) - exact) for fusions in ("none", "auto")
    )
    assert float((fused / plain).mean()) <= 1.2
    assert float((fused / plain).max()) <= 3.0


@BY_NAME
def test_greedy_texts_are_those_of_transformers(name: str) -> None:
    folder = models.folder(name, "float32")
    ids = likelihood.token_ids(folder).tolist()
    prompts = [ids[50 * index : 50 * index + 8 + index] for index in range(NUM_PROMPTS)]
    config = ShardConfig(
        "m", str(folder), "unix:/dev/null", dtype="float32", max_total_tokens=128, num_pages=8 * NUM_PROMPTS
    )
    texts = through_engine(config, prompts).texts
    network = models.network(folder, "float32")
    for prompt, text in zip(prompts, texts, strict=True):
        assert len(text) == NEW_TOKENS
        with torch.inference_mode():  # each token of the text must be the likeliest after those before it
            logits = network(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert float((logits.amax(1) - chosen).max()) < TIE
