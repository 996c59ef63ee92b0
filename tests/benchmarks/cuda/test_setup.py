"""Sizes of the models that are measured, and what a step takes at least."""

import pytest

from benchmarks.cuda.setup import GIB, LLAMA_1B, LLAMA_3B, LLAMA_8B, LlamaShape, Setup, fitted, step_bytes


def test_shapes_are_those_of_llama() -> None:
    """Parameters by the models' cards: 8.03 and 1.24 billion."""
    eight = LLAMA_8B.num_multiplied + LLAMA_8B.vocabulary * LLAMA_8B.hidden
    assert eight / 1e9 == pytest.approx(8.03, abs=0.01)
    assert LLAMA_1B.num_multiplied / 1e9 == pytest.approx(1.24, abs=0.01)
    assert LLAMA_8B.kv_bytes_per_token == 128 << 10


def test_a_step_reads_each_matrix_once_and_every_key_and_value() -> None:
    assert step_bytes(LLAMA_8B, 0) / 1e9 == pytest.approx(15.0, abs=0.05)
    assert step_bytes(LLAMA_8B, 1000) - step_bytes(LLAMA_8B, 0) == 1000 * (128 << 10)


@pytest.mark.parametrize(
    ("gigabytes", "capability", "model", "dtype", "requests"),
    [
        (15, (7, 5), LLAMA_3B, "float16", 32),
        (24, (8, 9), LLAMA_8B, "bfloat16", 32),
        (40, (8, 0), LLAMA_8B, "bfloat16", 32),
        (79, (9, 0), LLAMA_8B, "bfloat16", 64),
    ],
)
def test_a_smaller_card_measures_less(
    gigabytes: int, capability: tuple[int, int], model: LlamaShape, dtype: str, requests: int
) -> None:
    setup = fitted(Setup(), gigabytes * GIB, capability)
    assert (setup.large, setup.dtype, setup.requests) == (model, dtype, requests)
