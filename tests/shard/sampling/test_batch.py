"""A request gets the same bits in any batch, after it is added again, and for the same seed."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.sampling import HostSampled, Sampler
from tests.shard.sampling import oracle
from tests.shard.sampling.drawing import CPU, params
from tests.shard.sampling.oracle import Case

NUM_STEPS = 5


def any_words(rng: random.Random, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(1, 4))) for _ in range(40))


def any_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    def sometimes(value: float, neutral: float) -> float:
        return value if rng.random() < 0.4 else neutral

    return SamplingParams(
        do_sample=rng.random() < 0.7,
        temperature=sometimes(rng.uniform(0.3, 2.0), 1.0),
        top_k=int(sometimes(rng.randrange(1, 100), 0)),
        top_p=sometimes(rng.uniform(0.1, 1.0), 1.0),
        min_p=sometimes(rng.uniform(0.0, 0.3), 0.0),
        typical_p=sometimes(rng.uniform(0.2, 1.0), 1.0),
        repetition_penalty=sometimes(rng.uniform(0.7, 1.8), 1.0),
        frequency_penalty=sometimes(rng.uniform(-1, 2), 0.0),
        presence_penalty=sometimes(rng.uniform(-1, 2), 0.0),
        logit_bias=((rng.randrange(vocab_size), 3.0), (1, -1.0)) if rng.random() < 0.3 else (),
        watermark=rng.random() < 0.3,
        allowed_ids=tuple(rng.sample(range(vocab_size), vocab_size // 2)) if rng.random() < 0.2 else (),
        bad_words=any_words(rng, vocab_size) if rng.random() < 0.3 else (),
        min_tokens=rng.randrange(9),
        min_tokens_stop_ids=tuple(rng.choices(range(vocab_size), k=9)) if rng.random() < 0.3 else (),
        seed=rng.getrandbits(64),
    )


def any_logprobs(rng: random.Random) -> LogprobParams:
    return LogprobParams(wanted=rng.random() < 0.7, alternatives=rng.randrange(6), raw=rng.random() < 0.5)


class Batch:
    """Requests with their logits at every step, coarse enough for equal scores."""

    def __init__(self, seed: int, num_rows: int, vocab_size: int) -> None:
        rng = random.Random(seed)
        self.vocab_size, self.num_rows = vocab_size, num_rows
        self.params = [any_params(rng, vocab_size) for _ in range(num_rows)]
        self.logprobs = [any_logprobs(rng) for _ in range(num_rows)]
        self.known = [[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 20))] for _ in range(num_rows)]
        self.num_prompt = [rng.randrange(1, len(known) + 1) for known in self.known]
        generator = torch.Generator().manual_seed(seed)
        # [steps, R, V]
        self.logits = (torch.randn(NUM_STEPS, num_rows, vocab_size, generator=generator) * 3).bfloat16().float()

    def sampler(self, max_rows: int) -> Sampler:
        return Sampler(self.vocab_size, max_rows, CPU, 0.4, 1.5)

    def add(self, sampler: Sampler, request: int, row: int, output: list[int]) -> None:
        sampler.add(
            row, self.params[request], self.logprobs[request], self.known[request] + output, self.num_prompt[request]
        )

    def alone(self, request: int) -> list[HostSampled]:
        sampler = self.sampler(1)
        self.add(sampler, request, 0, [])
        start = len(self.known[request])
        return [
            sampler.sample(self.logits[step, request : request + 1], [0], [start + step]).to_host()
            for step in range(NUM_STEPS)
        ]


def row_of(host: HostSampled, at: int) -> tuple[object, ...]:
    logprob = host.logprobs[at]
    return (
        host.token_ids[at],
        logprob if logprob == logprob else None,
        host.alternative_ids[at],
        host.alternative_logprobs[at],
        host.bad[at],
    )


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(300, 24), (5003, 40), (70_001, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_gives_the_bits_of_each_request_alone(seed: int, vocab_size: int, num_rows: int) -> None:
    batch = Batch(seed, num_rows, vocab_size)
    alone = [batch.alone(request) for request in range(num_rows)]
    sampler = batch.sampler(2 * num_rows)
    order = list(range(num_rows))
    rng = random.Random(seed)
    for request in order:
        batch.add(sampler, request, 2 * request, [])
    for step in range(NUM_STEPS):
        rng.shuffle(order)
        kept = batch.logits[step].clone()
        positions = [len(batch.known[request]) + step for request in order]
        host = sampler.sample(batch.logits[step][order], [2 * request for request in order], positions).to_host()
        assert torch.equal(kept, batch.logits[step])
        for at, request in enumerate(order):
            assert row_of(host, at) == row_of(alone[request][step], 0), (request, batch.params[request])
            assert sampler.last_tokens[2 * request] == host.token_ids[at]


@pytest.mark.parametrize("seed", range(3))
def test_a_request_added_again_continues(seed: int) -> None:
    """In another row, with others, with its output so far as known tokens."""
    batch = Batch(seed, 16, 300)
    for request in range(16):
        whole = batch.alone(request)
        for cut in range(1, NUM_STEPS):
            sampler = batch.sampler(3)
            batch.add(sampler, (request + 1) % 16, 0, [])
            sampler.remove(0)
            batch.add(sampler, request, 2, [step.token_ids[0] for step in whole[:cut]])
            for step in range(cut, NUM_STEPS):
                position = len(batch.known[request]) + step
                host = sampler.sample(batch.logits[step, request : request + 1], [2], [position]).to_host()
                assert row_of(host, 0) == row_of(whole[step], 0), batch.params[request]


def test_rows_that_end_leave_nothing_behind() -> None:
    batch = Batch(4, 12, 300)
    sampler = batch.sampler(4)
    for turn in range(3):
        for request in range(12):
            row = (request + turn) % 4
            batch.add(sampler, request, row, [])
            host = sampler.sample(batch.logits[0, request : request + 1], [row], [len(batch.known[request])]).to_host()
            assert row_of(host, 0) == row_of(batch.alone(request)[0], 0)
            sampler.remove(row)


def test_a_taken_row_is_rejected() -> None:
    sampler = Sampler(10, 2, CPU)
    sampler.add(1, SamplingParams(), LogprobParams(), [3], 1)
    with pytest.raises(ValueError, match="row 1 of the sampler has a request"):
        sampler.add(1, SamplingParams(), LogprobParams(), [3], 1)


def test_a_seed_decides_the_text_and_only_a_seed() -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))

    def text(params: SamplingParams) -> list[int]:
        sampler = Sampler(500, 1, CPU)
        sampler.add(0, params, LogprobParams(), [1], 1)
        return [sampler.sample(row[None], [0], [at]).to_host().token_ids[0] for at, row in enumerate(logits, 1)]

    drawn = SamplingParams(do_sample=True, seed=2**64 - 5)
    assert text(drawn) == text(replace(drawn))
    for bit in (0, 31, 32, 40, 63):
        assert text(drawn) != text(replace(drawn, seed=drawn.seed ^ 1 << bit))
    greedy = SamplingParams(seed=1)
    assert text(greedy) == text(replace(greedy, seed=2)) == logits.argmax(-1).tolist()
    for sure in (replace(drawn, top_k=1), replace(drawn, temperature=1e-42), replace(drawn, top_p=1e-9)):
        assert text(sure) == text(greedy)


def test_bad_words_are_found_in_the_sampled_tokens() -> None:
    """Samples five tokens, against a loop over the whole output, for longer than the history that is kept."""
    rng = random.Random(2)
    logits = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    words = {(token, token) for token in range(5)}
    words |= {(*(rng.randrange(5) for _ in range(length)), rng.randrange(4)) for length in (2, 3, 4) for _ in range(40)}
    case = Case(bad_words=tuple(words))
    sampler, output = Sampler(5, 3, CPU), list[int]()
    sampler.add(1, params(case, do_sample=False), LogprobParams(), [1, 2, 3], 3)
    for step in range(300):
        scores = oracle.penalised(logits.numpy(), case, [1, 2, 3], output)
        output.append(int(scores.argmax()))
        assert sampler.sample(logits[None], [1], [3 + step]).to_host().token_ids == output[-1:]
    assert len(set(pairwise(output))) > 5


def test_counts_grow_with_the_requests_that_need_them() -> None:
    """Twenty requests with penalties at once, each with its own prompt."""
    sampler = Sampler(64, 20, CPU)
    logits = torch.zeros(20, 64)
    for row in range(20):
        sampler.add(row, SamplingParams(presence_penalty=1.0), LogprobParams(), [row], 0)
    tokens = []
    for step in range(30):
        tokens.append(sampler.sample(logits, range(20), [1 + step] * 20).to_host().token_ids)
    for row in range(20):
        # flat scores: the lowest token not yet seen
        assert [step[row] for step in tokens] == [token for token in range(31) if token != row][:30]
