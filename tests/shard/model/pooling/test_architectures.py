"""Embedders and classifiers of every architecture: as in transformers, and with the same bits alone and in a batch."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.bert.modeling_bert import BertSelfAttention

from tests import tiny_pooled
from tests.shard.model.pooling.pooled_engine import PooledEngine, expected, prompts_of
from tests.shard.near import worst_share


def assert_exact(engine: PooledEngine, expected: list[torch.Tensor], second_texts: list[int] | None = None) -> None:
    """The same values as `wanted`, and the same bits one by one."""
    prompts, types = prompts_of(), second_texts or []
    together = engine.run(prompts, types)
    assert [vector.shape for vector in together] == [want.shape for want in expected]
    columns = [torch.cat([value.reshape(-1, value.shape[-1]) for value in values]) for values in (together, expected)]
    assert worst_share(*columns) <= 1e-5
    for index in (0, 3, len(prompts) - 1):
        [alone] = engine.run([prompts[index]], types[index : index + 1])
        assert torch.equal(alone, together[index])


SAMPLE = ("bert", "roberta", "modernbert", "qwen3")
"""What `make test` runs."""


def cases(names: Iterable[str], sample: Collection[str] = SAMPLE) -> list[Any]:
    """The names, those outside of the sample marked as long."""
    return [name if name in sample else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", cases(tiny_pooled.VARIANTS))
def test_vectors_equal_transformers_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    folder = tiny_pooled.make(name, tmp_path / name)
    pooling = "last" if name in tiny_pooled.DECODERS else "mean"
    engine = PooledEngine(folder, pooling=pooling)
    assert_exact(engine, expected(folder, "embed", prompts_of(), pooling))


CLASSIFIERS = [name for name in tiny_pooled.VARIANTS if name not in ("xlm-roberta-xl", "eurobert")]


@pytest.mark.parametrize("name", cases(CLASSIFIERS, ("distilbert", "llama")))
@pytest.mark.parametrize("task", cases(("classify", "token-classify"), ("classify",)))
def test_scores_equal_transformers_alone_and_in_a_batch(name: str, task: str, tmp_path: Path) -> None:
    folder = tiny_pooled.make(name, tmp_path / name, task, num_labels=3)
    assert_exact(PooledEngine(folder), expected(folder, task, prompts_of()))


def test_pairs_have_token_types(tmp_path: Path) -> None:
    folder = tiny_pooled.make("bert", tmp_path / "bert", "classify", num_labels=1)
    second_texts = [max(1, len(prompt) // 2) for prompt in prompts_of()]
    reference = expected(folder, "classify", prompts_of(), second_texts=second_texts)
    assert_exact(PooledEngine(folder), reference, second_texts)


@pytest.mark.parametrize("pooling", cases(("mean", "cls"), ("mean",)))
def test_a_causal_model_is_pooled_in_other_ways(pooling: str, tmp_path: Path) -> None:
    folder = tiny_pooled.make("qwen3", tmp_path / "qwen3", "generate")
    assert_exact(PooledEngine(folder, pooling=pooling), expected(folder, "embed", prompts_of(), pooling))


@pytest.mark.parametrize("pooling", cases(("mean", "cls"), ("mean",)))
def test_every_token_has_a_vector_next_to_pooled_ones(pooling: str, tmp_path: Path) -> None:
    folder = tiny_pooled.sentence_transformer(tiny_pooled.make("bert", tmp_path / "bert"), pooling)
    engine, prompts = PooledEngine(folder), prompts_of()
    plain, per_token = range(0, len(prompts), 2), range(1, len(prompts), 2)
    vectors = engine.run(prompts, per_token=per_token)
    pooled, states = (expected(folder, "embed", prompts, name) for name in (pooling, "token"))
    for index, values in enumerate(vectors):
        want = torch.nn.functional.normalize((states if index in per_token else pooled)[index], dim=-1)
        assert values.shape == want.shape and torch.allclose(values, want, atol=1e-5)
    for index, alone in zip(plain, engine.run([prompts[index] for index in plain]), strict=True):
        assert torch.equal(alone, vectors[index])
    [alone] = engine.run(prompts[5:6], per_token=[0])
    assert torch.equal(alone, vectors[5])


def test_every_token_has_scores(tmp_path: Path) -> None:
    folder = tiny_pooled.make("distilbert", tmp_path / "distilbert", "classify", num_labels=3)
    engine, prompts = PooledEngine(folder), prompts_of()
    network = tiny_pooled.CLASSES["classify"].from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        for prompt, vectors in zip(prompts, engine.run(prompts, per_token=range(len(prompts))), strict=True):
            states = network.distilbert(torch.tensor([prompt])).last_hidden_state[0]
            assert torch.allclose(vectors, network.classifier(network.pre_classifier(states).relu()), atol=1e-5)


def test_last_token_in_chunks_and_from_the_prefix_cache(tmp_path: Path) -> None:
    folder = tiny_pooled.make("llama", tmp_path / "llama", "generate")
    reference = expected(folder, "embed", prompts_of(), "last")
    engine = PooledEngine(folder, pooling="last", step_tokens=7)
    first = engine.run(prompts_of())
    again = engine.run(prompts_of())
    assert engine.engine.scheduler.cache.num_cached > 0
    whole = PooledEngine(folder, pooling="last").run(prompts_of())
    assert worst_share(torch.stack(first), torch.stack(reference)) <= 1e-5
    for vectors, repeated, other in zip(first, again, whole, strict=True):
        assert torch.equal(vectors, repeated) and torch.equal(vectors, other)


def test_what_follows_the_pooling_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    folder = tiny_pooled.sentence_transformer(tiny_pooled.make("bert", tmp_path / "bert"), "cls", dense=24)
    engine = PooledEngine(folder)
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    for states, [vectors] in zip(expected(folder, "embed", prompts_of(), "cls"), engine.run(prompts_of()), strict=True):
        want = torch.tanh(states[0] @ weights["linear.weight"].t() + weights["linear.bias"])
        assert torch.allclose(vectors, torch.nn.functional.normalize(want, dim=0), atol=1e-5)


def test_an_architecture_that_is_computed_otherwise_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_pooled.make("bert", tmp_path / "bert")
    plain = BertSelfAttention.forward

    def leaky(self, hidden_states, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Sees the mean of the flat row."""
        return plain(self, hidden_states + hidden_states.mean(1, keepdim=True), *args, **kwargs)

    monkeypatch.setattr(BertSelfAttention, "forward", leaky)
    with pytest.raises(ValueError, match="cannot serve bert: packed into one row"):
        PooledEngine(folder)
