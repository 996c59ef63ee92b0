"""Embedders and classifiers of every architecture: as in transformers, and with the same bits alone and in a batch."""

from pathlib import Path

import pytest
import torch

from tests import tiny_pooled
from tests.shard.model.pooling.pooled_engine import PooledEngine, expected, prompts_of

CASES = [(name, "embed", pooling) for name in tiny_pooled.VARIANTS for pooling in ("mean", "cls", "last")]


def assert_exact(engine: PooledEngine, wanted: list[torch.Tensor], second_texts: list[int] | None = None) -> None:
    """The same values as `wanted`, and the same bits one by one."""
    prompts, types = prompts_of(), second_texts or []
    together = engine.run(prompts, types)
    for found, want in zip(together, wanted, strict=True):
        assert found.shape == want.shape
        assert float((found - want).abs().max()) <= 1e-5 * max(1.0, float(want.abs().max()))
    for index in (0, 3, len(prompts) - 1):
        [alone] = engine.run([prompts[index]], types[index : index + 1])
        assert torch.equal(alone, together[index])


@pytest.mark.parametrize("name", tiny_pooled.VARIANTS)
def test_vectors_equal_transformers_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    folder = tiny_pooled.make(name, tmp_path / name)
    pooling = "last" if name in tiny_pooled.DECODERS else "mean"
    engine = PooledEngine(folder, pooling=pooling)
    assert_exact(engine, expected(folder, "embed", prompts_of(), pooling))
