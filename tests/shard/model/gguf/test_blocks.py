"""Blocks of `.gguf` tensors: the values that the package `gguf` computes from the same bytes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lorikeet.proto.gguf.header import TYPES
from lorikeet.shard.model.gguf.blocks import FORMATS, read_blocks
from lorikeet.shard.model.kernels import integer
from lorikeet.shard.model.kernels.integer import PackedIntegers, StoredWeight, plain_product
from tests.shard.model.gguf.files import random_rows

gguf = pytest.importorskip("gguf")
FACTORS: dict[str, Callable[[bytes, int], int]] = {
    "Q8_K": lambda block, index: int.from_bytes(block[4 + index : 5 + index], signed=True),
    "Q1_0": lambda block, index: 1 if block[2 + index // 8] >> index % 8 & 1 else -1,
    "Q2_0": lambda block, index: (block[2 + index // 4] >> index % 4 * 2 & 3) - 1,
}
"""Types that the package does not read: value `index` of a block, before its scale, as ggml's C reads it."""


def expected_values(kind: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[out, in] float32."""
    if kind not in FACTORS:
        values: np.ndarray[Any, Any] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        return values
    form = next(form for form in TYPES.values() if form.name == kind)
    numbers = []
    for block in rows.reshape(-1, form.num_bytes):
        scale = block[:4].view(np.float32)[0] if kind == "Q8_K" else np.float32(block[:2].view(np.float16)[0])
        numbers += [np.float32(FACTORS[kind](block.tobytes(), index)) * scale for index in range(form.size)]
    return np.array(numbers).reshape(len(rows), -1)


def test_every_type_in_blocks_is_read() -> None:
    assert {form.name for form in TYPES.values() if form.size > 1} | {"Q8_K"} == set(FORMATS)
    of_package = {
        number.name: gguf.GGML_QUANT_SIZES[number] for number in gguf.GGMLQuantizationType if int(number) in TYPES
    }
    assert all(of_package.get(form.name) in (None, (form.size, form.num_bytes)) for form in TYPES.values())
    assert len(of_package) >= len(TYPES) - 1


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_those_of_the_package(kind: str) -> None:
    rows = random_rows(kind, 9, 512, seed=1)
    weight = read_blocks(kind, torch.from_numpy(rows))
    expected = expected_values(kind, rows)
    assert np.array_equal(weight.dense().numpy(), expected) and np.unique(expected).size > 8
    form = FORMATS[kind]
    assert (weight.bits, weight.group, weight.minimums is not None) == (form.bits, form.group, form.has_minimums)
    assert weight.values.dtype == (torch.int8 if form.bits == 8 else torch.uint8)
    assert weight.bits == 8 or int(weight.values.max()) < 16


@pytest.mark.skipif(not integer.available(), reason="needs a C compiler")
@pytest.mark.parametrize("kind", FORMATS)
def test_products_have_the_bits_of_the_reference(kind: str) -> None:
    weight = read_blocks(kind, torch.from_numpy(random_rows(kind, 40, 512, seed=2)))
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(0))
    assert torch.equal(PackedIntegers(weight, None).product(x, with_bias=False), plain_product(x, weight, None))


@pytest.mark.skipif(not integer.available(), reason="needs a C compiler")
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_a_weight_in_parts_is_packed_as_a_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.from_numpy(random_rows(kind, 200, 256, seed=3))
    whole = read_blocks(kind, rows)
    expected = PackedIntegers(whole, None)
    stored = StoredWeight((200, 256), whole.kind, lambda start, stop: read_blocks(kind, rows[start:stop]))
    monkeypatch.setattr(integer, "PART_ELEMENTS", 1)
    for weight in (stored, whole):
        assert [part.shape[0] for part in weight.parts()] == [64, 64, 64, 8]
        packed = PackedIntegers(weight, None)
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
        assert torch.equal(packed.product(x, with_bias=False), expected.product(x, with_bias=False))
        assert packed.nbytes == expected.nbytes
