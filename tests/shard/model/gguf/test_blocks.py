"""Blocks of `.gguf` tensors: the values that the package `gguf` computes from the same bytes."""

import numpy as np
import pytest
import torch

from lorikeet.shard.model.gguf.blocks import FORMATS, read_blocks
from lorikeet.shard.model.kernels import integer
from lorikeet.shard.model.kernels.integer import PackedIntegers, plain_product
from tests.shard.model.gguf.files import random_rows

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_those_of_the_package(kind: str) -> None:
    rows = random_rows(kind, 9, 512, seed=1)
    weight = read_blocks(kind, torch.from_numpy(rows))
    wanted = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(weight.dense().numpy(), wanted)
    assert weight.bits == (8 if kind in ("Q8_0", "Q5_K", "Q6_K") else 4)


@pytest.mark.skipif(not integer.available(), reason="needs a C compiler")
@pytest.mark.parametrize("kind", FORMATS)
def test_products_have_the_bits_of_the_reference(kind: str) -> None:
    weight = read_blocks(kind, torch.from_numpy(random_rows(kind, 40, 512, seed=2)))
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(0))
    assert torch.equal(PackedIntegers(weight, None).product(x, with_bias=False), plain_product(x, weight, None))
