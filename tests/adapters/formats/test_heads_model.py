"""The arithmetic of heads, against the formula written out, and version 1 against version 2."""

import pytest
import torch
from torch import Tensor

from lorikeet.adapters.formats.heads import HeadsFile, MedusaHeads, MedusaShape
from tests.adapters.medusa import small

HIDDEN, VOCAB = 16, 40


def output_head(seed: int = 9) -> Tensor:
    """[V, H]."""
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))


def rows(count: int = 7) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "shape", [MedusaShape(3, 1, HIDDEN), MedusaShape(2, 3, HIDDEN), MedusaShape(1, 1, HIDDEN)], ids=str
)
def test_a_head_is_residual_blocks_and_the_output_head(shape: MedusaShape) -> None:
    file, matrix = small.heads(shape, scale=0.3), output_head()
    actual = MedusaHeads.of(file).logits(rows(), lambda x: x @ matrix.T)
    assert actual.shape == (7, shape.num_heads, VOCAB)
    for s, row in enumerate(rows()):
        for head in range(shape.num_heads):
            x = row
            for block in range(shape.num_layers):
                inner = file.tensors[f"{head}.{block}.linear.weight"] @ x + file.tensors[f"{head}.{block}.linear.bias"]
                x = x + inner * torch.sigmoid(inner)
            torch.testing.assert_close(actual[s, head], matrix @ x, rtol=1e-4, atol=1e-4)


def test_new_heads_propose_what_the_base_predicts() -> None:
    matrix = output_head()
    heads = MedusaHeads(MedusaShape(3, 2, HIDDEN))
    best = (rows() @ matrix.T).argmax(-1)
    assert torch.equal(heads.propose(rows(), lambda x: x @ matrix.T), best[:, None].expand(-1, 3))


def test_version_1_with_the_base_models_matrix_proposes_what_version_2_does() -> None:
    two, matrix = small.heads(MedusaShape(3, 1, HIDDEN), scale=0.5), output_head()
    own = {f"{head}.1.weight": matrix for head in range(3)}
    one = MedusaHeads.of(HeadsFile(MedusaShape(3, 1, HIDDEN, VOCAB), {**two.tensors, **own}))

    def never(x: Tensor) -> Tensor:
        raise AssertionError("version 1 has matrices of its own")

    many = rows(50)
    proposals = MedusaHeads.of(two).propose(many, lambda x: x @ matrix.T)
    assert torch.equal(one.propose(many, never), proposals)
    assert len(proposals.unique()) > 5


def test_heads_of_matrices_alone() -> None:
    file = small.heads(MedusaShape(2, 0, HIDDEN, VOCAB))
    actual = MedusaHeads.of(file).logits(rows(), lambda x: x)
    torch.testing.assert_close(actual[:, 1], rows() @ file.tensors["1.0.weight"].T)


def test_tokens_outside_the_bases_vocabulary_are_never_proposed() -> None:
    file = small.heads(MedusaShape(1, 0, HIDDEN, VOCAB))
    heads = MedusaHeads.of(file)
    assert heads.propose(rows(200), lambda x: x).max() >= 30
    assert heads.propose(rows(200), lambda x: x, vocab_size=30).max() < 30


def test_tensors_are_returned_unchanged() -> None:
    file = small.heads(MedusaShape(2, 2, HIDDEN, VOCAB))
    again = MedusaHeads.of(file).tensors(torch.float32)
    assert again.keys() == file.tensors.keys()
    assert all(torch.equal(again[name], file.tensors[name]) for name in again)
