"""The noise: the published hash, uniform, and unrelated between neighbouring tokens, positions, seeds and purposes."""

from itertools import combinations

import numpy as np
import pytest
import torch

from lorikeet.shard.sampling.noise import Purpose, as_signed, hash_bits, log_exponentials, row_keys, token_words
from tests.shard.sampling import oracle
from tests.shard.sampling.drawing import CPU

SAFE = 1e-6
SIDE = 1024


def keys(seeds: list[int], positions: list[int], purpose: Purpose = Purpose.DRAW) -> torch.Tensor:
    signed = [as_signed(seed) for seed in seeds]
    return row_keys(torch.tensor(signed), torch.tensor(positions), purpose)


def uniforms(seeds: list[int], positions: list[int], num_ids: int = SIDE) -> np.ndarray:
    """[S, V] in (0, 1)."""
    noise = log_exponentials(token_words(num_ids, CPU), keys(seeds, positions))
    return -np.expm1(-np.exp(noise.double().numpy()))


def tables() -> dict[str, np.ndarray]:
    """[rows, ids] of uniforms whose rows are neighbours in one respect."""
    counting = list(range(SIDE))
    return {
        "positions": uniforms([7] * SIDE, counting),
        "seeds": uniforms(counting, [100] * SIDE),
        "seeds far apart": uniforms([as_signed(i << 54) for i in counting], [3] * SIDE),
        "seeds and positions": uniforms(counting, counting[::-1]),
    }


TABLES = tables()


def test_bits_are_the_published_hash() -> None:
    seeds, positions = [0, 1, 2**63, 2**64 - 1, 0xDEADBEEF12345678], [0, 1, 17, 131071, 5]
    for purpose in Purpose:
        bits = hash_bits(token_words(50, CPU), keys(seeds, positions, purpose)).tolist()
        expected = [
            [oracle.noise_bits(seed, position, token, int(purpose)) for token in range(50)]
            for seed, position in zip(seeds, positions, strict=True)
        ]
        assert bits == expected


def test_exponentials_follow_from_the_bits() -> None:
    noise = log_exponentials(token_words(200, CPU), keys([3, 4], [10, 11]))
    expected = [
        [oracle.log_exponential(seed, position, token) for token in range(200)] for seed, position in ((3, 10), (4, 11))
    ]
    np.testing.assert_allclose(noise.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("name", TABLES)
def test_uniform(name: str) -> None:
    table = TABLES[name]
    counts = np.bincount((table * 1024).astype(int).ravel(), minlength=1024)
    assert oracle.fit(counts, np.full(1024, 1 / 1024)) > SAFE
    # the smallest win the draws: the first 1/1024 again in 64 parts
    small = table[table < 1 / 1024] * 1024
    counts = np.bincount((small * 64).astype(int), minlength=64)
    assert oracle.fit(counts, np.full(64, 1 / 64)) > SAFE


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (0, 256), (256, 0)])
def test_neighbours_are_independent(name: str, step: tuple[int, int]) -> None:
    table = TABLES[name]
    other = np.roll(table, (-step[0], -step[1]), axis=(0, 1))
    counts = np.bincount(((table * 32).astype(int) * 32 + (other * 32).astype(int)).ravel(), minlength=1024)
    assert oracle.fit(counts, np.full(1024, 1 / 1024)) > SAFE
    correlation = np.corrcoef(np.log(table).ravel(), np.log(other).ravel())[0, 1]
    assert abs(correlation) < 5 / SIDE


@pytest.mark.parametrize("name", TABLES)
def test_who_is_smallest_is_independent_between_rows(name: str) -> None:
    """The smallest of 16 tokens in a row and in the next row: all pairs equally often."""
    rows = TABLES[name].reshape(SIDE, SIDE // 16, 16).argmin(-1)
    counts = np.bincount((rows[0::2] * 16 + rows[1::2]).ravel(), minlength=256)
    assert oracle.fit(counts, np.full(256, 1 / 256)) > SAFE


@pytest.mark.parametrize("pair", list(combinations(Purpose, 2)), ids=str)
def test_purposes_are_unrelated(pair: tuple[Purpose, Purpose]) -> None:
    words = token_words(SIDE, CPU)
    one, two = (hash_bits(words, keys([5] * 64, list(range(64)), purpose)) >> 59 for purpose in pair)
    counts = np.bincount(((one + 16) * 32 + two + 16).ravel().numpy(), minlength=1024)
    assert oracle.fit(counts, np.full(1024, 1 / 1024)) > SAFE


@pytest.mark.parametrize("vocab_size", [7, 255, 1003])
def test_noise_is_that_of_the_row_alone(vocab_size: int) -> None:
    words, all_keys = token_words(vocab_size, CPU), keys(list(range(33)), list(range(33)))
    together = log_exponentials(words, all_keys)
    alone = torch.cat([log_exponentials(words, key) for key in all_keys.split(1)])
    narrow = log_exponentials(words[:5], all_keys)
    assert torch.equal(together, alone)
    assert torch.equal(together[:, :5], narrow)
    assert torch.isfinite(together).all()
