"""On CUDA: the noise of the CPU, the tokens of the CPU, and no wait of the host while sampling."""

import random

import pytest
import torch

from lorikeet.proto.params import LogprobParams
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.sampling.noise import Purpose, hash_bits, log_exponentials, row_keys, token_words
from tests.shard.sampling.test_batch import any_logprobs, any_params

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_ROWS, V = 24, 5000


def test_noise_is_that_of_the_cpu() -> None:
    found = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        words = token_words(V, device)
        keys = row_keys(torch.arange(NUM_ROWS, device=device), torch.arange(NUM_ROWS, device=device), Purpose.DRAW)
        found.append((hash_bits(words, keys).cpu(), log_exponentials(words, keys).cpu()))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], atol=2e-6, rtol=1e-6)


def test_tokens_are_those_of_the_cpu() -> None:
    rng = random.Random(1)
    params = [any_params(rng, V) for _ in range(NUM_ROWS)]
    logprobs: list[LogprobParams] = [any_logprobs(rng) for _ in range(NUM_ROWS)]
    logits = torch.randn(6, NUM_ROWS, V, generator=torch.Generator().manual_seed(0)) * 3
    tables = logits.cuda()
    texts = []
    for device, rows in (("cpu", logits), ("cuda", tables)):
        sampler = Sampler(V, NUM_ROWS, torch.device(device))
        torch.cuda.set_sync_debug_mode("error")
        for row in range(NUM_ROWS):
            sampler.add(row, params[row], logprobs[row], [1, 2, 3], 2)
        steps = [sampler.sample(table, range(NUM_ROWS), [3 + at] * NUM_ROWS) for at, table in enumerate(rows)]
        torch.cuda.set_sync_debug_mode("default")
        texts.append([step.to_host() for step in steps])
    for cpu, cuda in zip(*texts, strict=True):
        assert cpu.token_ids == cuda.token_ids
        assert cpu.alternative_ids == cuda.alternative_ids
        torch.testing.assert_close(
            torch.tensor(cpu.logprobs), torch.tensor(cuda.logprobs), atol=1e-4, rtol=0, equal_nan=True
        )
