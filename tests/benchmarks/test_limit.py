"""The limit of a machine for a closed loop, against numbers worked out by hand."""

import pytest

from benchmarks.models.limit import LLAMA_200M, Machine, tokens_per_second


def test_sizes_of_the_model() -> None:
    assert LLAMA_200M.num_multiplied == 16 * (2 * 1024 * 1024 + 2 * 256 * 1024 + 3 * 2816 * 1024) + 8192 * 1024
    assert LLAMA_200M.weight_bytes == 2 * (LLAMA_200M.num_multiplied + 8192 * 1024 + 33 * 1024)
    assert LLAMA_200M.kv_bytes_per_token == 16 * 2 * 4 * 64 * 2


@pytest.mark.parametrize(("clients", "expected"), [(1, 65), (8, 202), (32, 240)])
def test_known_machine(clients: int, expected: float) -> None:
    """454 GFLOP/s and 33 GB/s give about 63, 203 and 249 tokens per second."""
    assert tokens_per_second(Machine(454e9, 33e9), clients) == pytest.approx(expected, rel=0.01)


def test_reading_binds_one_client_and_computing_thirty_two() -> None:
    slow, fast = Machine(454e9, 33e9), Machine(454e9, 66e9)
    assert tokens_per_second(fast, 1) > 1.5 * tokens_per_second(slow, 1)
    assert tokens_per_second(fast, 32) == tokens_per_second(slow, 32)
