"""The same vectors and scores as sentence-transformers, for models with its configuration files."""

from pathlib import Path

import pytest
import torch

from tests import tiny_pooled
from tests.shard.model.pooling.pooled_engine import PooledEngine
from tests.shard.near import worst_share

pytestmark = pytest.mark.long

TEXTS = ["the quick brown fox", "a parrot", "word for word. " * 5, "the adapters say, repeats what "]
CASES = {
    "bert": {"pooling": "mean"},
    "distilbert": {"pooling": "cls", "dense": 24},
    "roberta": {"pooling": "mean", "normalize": False},
    "modernbert": {"pooling": "cls"},
    "qwen3": {"pooling": "last"},
    "llama": {"pooling": "mean"},
}


@pytest.mark.parametrize("name", CASES)
def test_vectors(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder = tiny_pooled.sentence_transformer(tiny_pooled.make(name, tmp_path / name), **CASES[name])  # type: ignore[arg-type]
    model = library.SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    expected = torch.from_numpy(model.encode(TEXTS))
    prompts = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    actual = torch.cat(PooledEngine(folder).run(prompts))
    assert worst_share(actual, expected) <= 1e-5


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "qwen2"])
def test_scores_of_pairs(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder = tiny_pooled.make(name, tmp_path / name, "classify", num_labels=1)
    model = library.CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    pairs = [(TEXTS[0], text) for text in TEXTS[1:]]
    expected = torch.from_numpy(model.predict(pairs))
    prompts = [model.tokenizer(*pair)["input_ids"] for pair in pairs]
    actual = torch.cat(PooledEngine(folder).run(prompts))[:, 0].sigmoid()
    assert float((actual - expected).abs().max()) <= 1e-5
