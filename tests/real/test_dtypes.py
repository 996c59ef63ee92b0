"""Real models in every number format: the log likelihood of a text next to transformers in float32, greedy texts."""

from pathlib import Path

import pytest
import torch

from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.system import comparison
from tests.real import likelihood, models
from tests.real.results import record
from tests.shard.engine.exactness import TIE, through_engine

pytestmark = pytest.mark.real

MOST = 0.01
"""Nats per token that a number format may cost."""
NUM_PROMPTS = 40
NUM_LOGITS = 64
NUM_NEW = 16
"""Tokens of each greedy text."""
WINDOW = 512
"""Of Gemma 3's attention."""
BY_NAME = pytest.mark.parametrize("name", models.FILES)


@BY_NAME
def test_every_token_is_as_likely_as_in_transformers(name: str) -> None:
    """In float32, also where the text is longer than Gemma's sliding window."""
    served = likelihood.of_served(name, models.folder(name, "float32"), "float32")
    assert len(likelihood.ids_of(name)) == 2 * WINDOW
    assert float((served.tokens - likelihood.reference(name)).abs().max()) <= 1e-3
    if name == "smollm2":
        record("float32", "float32", served, float(likelihood.reference(name).mean()))


@pytest.mark.parametrize(("name", "dtype"), [("smollm2", "bfloat16"), ("gemma3", "bfloat16"), ("smollm2", "float16")])
def test_sixteen_bits_cost_little(name: str, dtype: str) -> None:
    expected = float(likelihood.reference(name).mean())
    served = likelihood.of_served(name, models.folder(name, "float32"), dtype)
    assert served.mean <= expected + MOST
    if name == "smollm2":
        record(dtype, dtype, served, expected)


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
    ids = likelihood.ids_of(name)[:NUM_LOGITS]
    exact = logits_of(folder, ids, "float32", "none")
    plain, fused = (
        comparison.channel_sizes(logits_of(folder, ids, "bfloat16", fusions) - exact) for fusions in ("none", "auto")
    )
    assert float((fused / plain).mean()) <= 1.2
    assert float((fused / plain).max()) <= 3.0


@BY_NAME
def test_greedy_texts_are_those_of_transformers(name: str) -> None:
    """The first two prompts are longer than Gemma's sliding window."""
    folder, ids = models.folder(name, "float32"), likelihood.ids_of(name).tolist()
    prompts = [ids[: WINDOW + 90], ids[300 : 300 + WINDOW + 190]]
    prompts += [ids[20 * index : 20 * index + 2 + index] for index in range(len(prompts), NUM_PROMPTS)]
    config = ShardConfig(
        "m", str(folder), "unix:/dev/null", dtype="float32", max_total_tokens=2 * WINDOW, num_pages=8 * NUM_PROMPTS
    )
    texts = through_engine(config, prompts, num_new=NUM_NEW).texts
    network = models.network(folder, "float32")
    for prompt, text in zip(prompts, texts, strict=True):
        assert len(text) == NUM_NEW
        with torch.inference_mode():  # each token of the text must be the likeliest after those before it
            logits = network(torch.tensor([prompt + text]), logits_to_keep=NUM_NEW + 1).logits[0, :-1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert float((logits.amax(1) - chosen).max()) < TIE
