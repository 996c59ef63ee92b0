"""An embedding that shares the output head's weight reads it packed: the same values, and one copy of them."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.adapters.discovery import PackedLinear
from lorikeet.shard.model.kernels import cpu
from lorikeet.shard.model.kernels.packing import PackedEmbedding, StreamedMatrix, embed_by
from tests import tiny
from tests.shard.engine.exactness import drive

PROMPTS = [[1, 2, 3], [5, 4, 3, 2, 1, 0, 7], [11]]

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs a compiler")


def loaded(folder: Path) -> Model:
    return load_model(
        ShardConfig("some/model", str(folder), f"unix:{folder}/shard.sock", max_total_tokens=64, threads=2)
    )


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "bloom"])
def test_a_tied_model_has_the_bits_of_the_same_weights_twice(name: str, tmp_path: Path) -> None:
    tied = tiny.make_realistic(name, tmp_path / "tied", torch.bfloat16, tie_word_embeddings=True, vocab_size=323)
    plain = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1, 63, 64, 100, 322]])
    expected = plain.get_input_embeddings()(ids)
    plain.config.tie_word_embeddings = False
    plain.lm_head.weight = nn.Parameter(plain.get_input_embeddings().weight.clone())
    plain.save_pretrained(tmp_path / "twice")

    model = loaded(tied)
    embedding, head = model.network.get_input_embeddings(), model.network.get_output_embeddings()
    assert isinstance(embedding, PackedEmbedding) and not embedding.weight.numel()
    assert isinstance(head, PackedLinear) and head.matrix is embedding.matrix
    assert torch.equal(embedding(ids), expected)
    with pytest.raises(IndexError, match="must be below 323"):
        embedding(torch.tensor([[1, 323]]))

    twice = loaded(tmp_path / "twice")
    assert not isinstance(twice.network.get_input_embeddings(), PackedEmbedding)
    for ours, theirs in zip(drive(model, PROMPTS, step_tokens=5), drive(twice, PROMPTS, step_tokens=5), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert torch.equal(ours.logprobs, theirs.logprobs)


@pytest.mark.parametrize("shape", [(1, 2), (64, 16), (130, 34), (4096, 64)], ids=str)
def test_rows_of_a_packed_matrix(shape: tuple[int, int]) -> None:
    """Of few and of many ids, which several threads read."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator).bfloat16()
    matrix = StreamedMatrix(weight, None)
    for size in ((1,), (2, 3), (0,), (700,)):
        ids = torch.randint(0, shape[0], size, generator=generator)
        assert torch.equal(matrix.rows(ids), weight[ids])
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError):
            matrix.rows(torch.tensor([0, wrong]))


class Doubled(nn.Embedding):
    """Changes what torch's `forward` returns."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.tensor(2.0).to(self.weight.dtype)


class OnItsOwn(nn.Embedding):
    """Reads the weight itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[input]


@pytest.mark.parametrize("kind", [nn.Embedding, Doubled, OnItsOwn])
def test_a_class_of_its_own_is_kept(kind: type[nn.Embedding]) -> None:
    embedding = kind(70, 32, dtype=torch.bfloat16)
    ids = torch.arange(70)
    expected, matrix = embedding(ids), StreamedMatrix(embedding.weight.detach(), None)
    assert embed_by(embedding, matrix) == (kind is not OnItsOwn)
    assert torch.equal(embedding(ids), expected)
    assert isinstance(embedding, kind)
    assert (type(embedding) is kind, embedding.weight.numel() > 0) == (kind is OnItsOwn, kind is OnItsOwn)
