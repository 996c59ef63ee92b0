"""Sizes of the models that are measured, and what a step takes at least."""

import pytest

from benchmarks.cuda.mixes import share_by_bytes
from benchmarks.cuda.setup import LLAMA_1B, LLAMA_8B, Setup, Speeds, floors, step_bytes

CARD = Speeds(copy=4e12, read=4.4e12, flops=7.5e14, upload=5e10)


def test_shapes_are_those_of_llama() -> None:
    """Parameters by the models' cards: 8.03 and 1.24 billion."""
    eight = LLAMA_8B.num_multiplied + LLAMA_8B.vocabulary * LLAMA_8B.hidden
    assert eight / 1e9 == pytest.approx(8.03, abs=0.01)
    assert LLAMA_1B.num_multiplied / 1e9 == pytest.approx(1.24, abs=0.01)
    assert LLAMA_8B.kv_bytes_per_token == 128 << 10


def test_a_step_reads_each_matrix_once_and_every_key_and_value() -> None:
    assert step_bytes(LLAMA_8B, 0) / 1e9 == pytest.approx(15.0, abs=0.05)
    assert step_bytes(LLAMA_8B, 1000) - step_bytes(LLAMA_8B, 0) == 1000 * (128 << 10)


def test_few_rows_wait_for_memory_and_many_for_products() -> None:
    by_bandwidth, by_products = floors(LLAMA_8B, 1, 200, CARD)
    assert by_bandwidth == pytest.approx(3.76e-3, rel=0.01) and by_products < by_bandwidth / 100
    by_bandwidth, by_products = floors(LLAMA_8B, 1024, 0, CARD)
    assert by_products > by_bandwidth


def test_adapters_are_judged_by_the_bytes_that_a_step_must_read() -> None:
    setup = Setup()
    raw = {"bare": {"tokens_per_second": 100.0}, "distinct": {"tokens_per_second": 76.0}}
    more = 64 * 16 * LLAMA_8B.layers * 2 * sum(sum(each) for each in LLAMA_8B.linears)
    assert more / 1e9 == pytest.approx(5.4, abs=0.1)
    assert share_by_bytes(setup, "distinct", raw) == pytest.approx(0.76 * (1 + more / step_bytes(LLAMA_8B, 64 * 224)))
