"""The kernels that sample against the sampler without kernels: run by test_triton.py in a process of its own, on CUDA
or, with TRITON_INTERPRET=1, on CPU.
"""

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.batch.device_tokens import put_by_operators
from lorikeet.shard.batch.device_tokens_triton import BLOCK, move, put_device_tokens
from lorikeet.shard.batch.inputs import Move, move_by_operators
from lorikeet.shard.requests.request import Source
from lorikeet.shard.sampling import HostSampled, Sampler
from lorikeet.shard.sampling.device import Tile
from lorikeet.shard.speculation.device.device_drafts import StepDrafts
from tests.shard.sampling.test_batch import any_params

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
ROOMY, TIGHT = Tile(width=128, room=512), Tile(width=256, room=32)
"""With room for every token of a small vocabulary, and for few."""
KNOWN, NUM_PROMPT, NUM_MORE = [3, 5, 3, 8, 1], 3, 10


def any_rows(seed: int, count: int, vocab_size: int) -> list[tuple[SamplingParams, LogprobParams]]:
    """Requests that the kernels support, each with the log probability of its tokens or not."""
    rng = random.Random(seed)
    chosen = [replace(any_params(rng, vocab_size), watermark=False, bad_words=()) for _ in range(count)]
    return [(each, LogprobParams(rng.random() < 0.7, raw=rng.random() < 0.5)) for each in chosen]


def logits_of(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


class Both:
    """The same requests in a sampler with kernels and in one without."""

    def __init__(self, rows: list[tuple[SamplingParams, LogprobParams]], vocab_size: int, tile: Tile) -> None:
        self.count = len(rows)
        self.samplers = (
            Sampler(vocab_size, 2 * len(rows) + NUM_MORE, torch.device("cpu")),
            Sampler(vocab_size, 2 * len(rows) + NUM_MORE, DEVICE, tile=tile),
        )
        for sampler in self.samplers:
            for at, (params, logprobs) in enumerate(rows):
                sampler.add(2 * at, params, logprobs, KNOWN, NUM_PROMPT)

    def sample(self, logits: torch.Tensor, step: int) -> tuple[HostSampled, HostSampled]:
        rows, positions = [2 * at for at in range(self.count)], [len(KNOWN) + step] * self.count
        devices = [sampler.last_tokens.device for sampler in self.samplers]
        steps = [sampler.sample(logits.to(device), rows, positions)
                 for sampler, device in zip(self.samplers, devices, strict=True)]  # fmt: skip
        return steps[0].to_host(), steps[1].to_host()


def check(plain: HostSampled, fused: HostSampled) -> None:
    assert plain.bad == fused.bad
    assert plain.token_ids == fused.token_ids
    wanted, found = torch.tensor(plain.logprobs), torch.tensor(fused.logprobs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("seed", "tile"), [*((seed, ROOMY) for seed in range(6)), (0, TIGHT), (1, TIGHT)],
                         ids=[*(f"roomy-{seed}" for seed in range(6)), "tight-0", "tight-1"])  # fmt: skip
def test_tokens_are_those_of_the_specification(seed: int, tile: Tile) -> None:
    both = Both(any_rows(seed, 6, 300), 300, tile)
    for step in range(3 if tile is ROOMY else 1):
        check(*both.sample(logits_of(seed + 50 * step, both.count, 300), step))
    states = [sampler._state for sampler in both.samplers]
    assert torch.equal(states[0].last_tokens, states[1].last_tokens.cpu())
    assert torch.equal(states[0].counts.table, states[1].counts.table.cpu())


FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "typical": {"typical_p": 0.5},
    "nearly all typical": {"typical_p": 0.99},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8},
    "more than there are": {"top_k": 1000, "top_p": 0.999999},
}


def rows_with(name: str, count: int = 2) -> list[tuple[SamplingParams, LogprobParams]]:
    wanted = LogprobParams(wanted=True)
    params = [SamplingParams(do_sample=True, seed=seed, **FILTERS[name]) for seed in range(count)]  # type: ignore[arg-type]
    return [(each, wanted) for each in params]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize("tile", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_filters_keep_what_the_specification_keeps(name: str, scale: float, tile: Tile) -> None:
    """Covers flat distributions, whose tokens do not fit into a small buffer, and peaked ones."""
    both = Both(rows_with(name), 200, tile)
    plain, fused = both.sample(logits_of(1, both.count, 200, scale=scale), 0)
    check(plain, fused)
    if tile is ROOMY:
        assert fused.num_overflowed == 0
    elif scale < 1 and name in ("top_p", "more than there are", "nearly all typical"):
        assert fused.num_overflowed == both.count


@pytest.mark.parametrize("tile", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_a_row_has_equal_bits_in_any_batch(tile: Tile) -> None:
    rows, logits = any_rows(3, 3, 300), logits_of(4, 3, 300)
    together = Both(rows, 300, tile).sample(logits, 0)[1]
    for at, row in enumerate(rows):
        alone = Both([row], 300, tile).sample(logits[at : at + 1], 0)[1]
        assert (alone.token_ids[0], repr(alone.logprobs[0])) == (together.token_ids[at], repr(together.logprobs[at]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scores_that_are_not_finite_are_bad() -> None:
    rows = [*rows_with("none", 4), *rows_with("top_p", 4), *[(SamplingParams(), LogprobParams())] * 4]
    logits = logits_of(2, 12, 150)
    for first in (0, 4, 8):
        logits[first, 100] = float("nan")
        logits[first + 1, 3] = float("inf")
        logits[first + 2] = float("-inf")
    plain, fused = Both(rows, 150, ROOMY).sample(logits, 0)
    assert fused.bad == plain.bad == [True, True, True, False] * 3
    assert all(0 <= token_id < 150 for token_id in fused.token_ids)
    assert fused.token_ids[3::4] == plain.token_ids[3::4]


def test_drafts_are_verified_alike_and_change_the_same_state() -> None:
    """With and without penalties, next to requests that the kernels do not support."""
    rows = any_rows(7, 6, 120)
    rows[1] = replace(rows[1][0], watermark=True), rows[1][1]
    rows[4] = rows[4][0], LogprobParams(wanted=True, alternatives=2)
    both, drafts = Both(rows, 120, ROOMY), [[5, 9], [], [1], [7, 7, 7], [2, 3], []]
    logits = logits_of(6, sum(1 + len(ids) for ids in drafts), 120)
    found = []
    for sampler in both.samplers:
        on_device = logits.to(sampler.last_tokens.device)
        for repeat in range(2):
            positions = [len(KNOWN) + repeat] * len(rows)
            step = sampler.verify(on_device, [2 * at for at in range(len(rows))], positions, drafts)
        found.append((step.to_host(), sampler.last_tokens.cpu(), sampler._state.counts.table.cpu()))
    check(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])


def test_a_row_that_is_given_back_leaves_nothing_behind() -> None:
    first, second = any_rows(5, 2, 100)
    both = Both([first], 100, ROOMY)
    logits = logits_of(9, 1, 100)
    both.sample(logits, 0)
    for sampler in both.samplers:
        sampler.remove(0)
        sampler.add(0, *second, KNOWN, NUM_PROMPT)
    check(*both.sample(logits, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_samples_the_rows_that_it_is_given(dtype: torch.dtype) -> None:
    """Tokens and state are those of the same kernels outside a graph. Nothing else changes, and the logits of all other
    rows are kept.
    """
    rows = any_rows(11, 5, 300)
    logits = logits_of(12, 8, 300).to(DEVICE, dtype)
    given = torch.tensor([4, -1, 0, 8, -1, 2, -1, -1], device=DEVICE)  # the last two are no wanted rows
    places = [place for place, row in enumerate(given.tolist()) if row >= 0]
    outside, inside = (Both(rows, 300, ROOMY).samplers[1] for _ in range(2))
    graph = inside.in_graph
    assert graph is not None
    before = inside.take_from_graph(6, 6).to_host()
    for step in range(2):
        positions = torch.full((6,), len(KNOWN) + step, device=DEVICE)
        kept = torch.full((8, 300), -9.0, device=DEVICE)
        graph.launch(logits, given, positions, kept)
        found = inside.take_from_graph(6, 6).to_host()
        wanted = outside.sample(logits[places].float(), given[places].tolist(), [len(KNOWN) + step] * 4).to_host()
        assert [found.token_ids[place] for place in places] == wanted.token_ids
        assert repr([found.logprobs[place] for place in places]) == repr(wanted.logprobs)
        assert [found.token_ids[place] for place in (1, 4)] == [before.token_ids[place] for place in (1, 4)]
        others = [place for place in range(8) if place not in places]
        assert torch.equal(kept[others], logits[others].float()) and (kept[places] == -9.0).all()
        assert torch.equal(outside.last_tokens, inside.last_tokens)
        assert torch.equal(outside._state.counts.table, inside._state.counts.table)


def test_counts_are_found_after_their_table_has_grown() -> None:
    """A captured step has the addresses that it was captured with."""
    penalised = (SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5), LogprobParams())
    both, logits = Both([penalised], 100, ROOMY), logits_of(9, 1, 100)
    for sampler in both.samplers:
        address = sampler._state.counts.address.data_ptr()
        for row in range(3, 12):
            sampler.add(row, *penalised, KNOWN, NUM_PROMPT)
        assert sampler._state.counts.address.data_ptr() == address
    for step in range(3):
        check(*both.sample(logits, step))
    assert torch.equal(*(sampler._state.counts.table.cpu() for sampler in both.samplers))


def test_a_vocabulary_of_a_real_model() -> None:
    vocab_size = 128_256
    both = Both([rows_with("top_p", 1)[0], rows_with("all", 1)[0], rows_with("none", 1)[0]], vocab_size, Tile())
    plain, fused = both.sample(logits_of(8, 3, vocab_size, scale=4.0), 0)
    check(plain, fused)
    assert fused.num_overflowed == 0


@pytest.mark.parametrize("num_moved", [1, BLOCK, BLOCK + 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.long])
@pytest.mark.parametrize("chooses", [False, True])
def test_a_step_moves_by_what_was_accepted(num_moved: int, dtype: torch.dtype, chooses: bool) -> None:
    rng = np.random.default_rng(num_moved)
    numbers = torch.from_numpy(rng.integers(0, 1000, 400)).to(DEVICE, dtype)
    num_accepted = torch.from_numpy(rng.integers(1, 4, 9)).to(DEVICE)
    places, rows = rng.permutation(400)[:num_moved], rng.integers(0, 9, num_moved)
    choices = rng.integers(0, 1000, (num_moved, 4)) if chooses else None
    table = torch.from_numpy(np.stack([places, rows, *(() if choices is None else choices.T)]).ravel()).to(DEVICE)
    moved = numbers.clone()
    move(moved, table, num_accepted, num_moved, chooses)
    by_operators = numbers.clone()
    move_by_operators(Move(by_operators, places, rows, choices), table, num_accepted)
    assert torch.equal(moved, by_operators) and not torch.equal(moved, numbers)


@pytest.mark.parametrize("num_tokens", [1, 7, BLOCK, 2 * BLOCK + 3])
def test_a_step_takes_the_newest_tokens_that_were_sampled(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids, tokens = torch.arange(num_tokens), torch.randint(1000, 2000, (9,), generator=generator)
    tokens[4] = -1  # no draft
    rows = torch.randint(-1, 9, (num_tokens,), generator=generator, dtype=torch.int32)
    wanted, found, rows, tokens = (each.to(DEVICE) for each in (ids.clone(), ids, rows, tokens))
    put_by_operators(wanted, rows, tokens)
    for _ in range(2):  # again: the first of several ranks does it before it sends them, and in its graph
        put_device_tokens(found, rows, tokens)
        assert torch.equal(found, wanted)
    assert torch.equal(found >= 1000, (rows >= 0) & (rows != 4))
    assert (found[rows == 4] == 0).all()


def test_one_launch_verifies_drafts_of_the_device_as_they_are_verified_one_by_one() -> None:
    """Next to a row with penalties, whose counts go on; some drafts are accepted, some are not."""
    rng, vocabulary, text = random.Random(4), 50, [7, 8, 9, 3, 7, 8, 9, 3, 7]
    params = [
        SamplingParams(), SamplingParams(do_sample=True, seed=5, top_p=0.8),
        SamplingParams(do_sample=True, seed=9, repetition_penalty=1.3),
    ]  # fmt: skip
    samplers = []
    for _ in range(2):
        sampler = Sampler(vocabulary, 4, DEVICE, tile=ROOMY)
        for row, each in enumerate(params):
            most = 0 if each.is_penalised else 200
            sampler.add(row, each, LogprobParams(wanted=row == 1), text, len(text), most_tokens=most)
        samplers.append(sampler)
    rows, num_accepted = [2, 0, 1], 0
    for step in range(5):
        widths = [0, 3, 2] if step else [0, 0, 0]
        counts = np.array([1 + width for width in widths])
        firsts = np.cumsum(counts) - counts
        logits = logits_of(step, int(counts.sum()), vocabulary).to(DEVICE)
        for index, row in enumerate(rows[1:], 1):
            for depth in range(widths[index]):  # the first of its drafts is likely, the others at times
                draft = int(samplers[0].device_drafts._draft_ids[0, row, depth])
                logits[firsts[index] + depth, max(draft, 0)] += 30 * (depth == 0 or rng.random() < 0.5)
        positions = torch.from_numpy(np.concatenate([len(text) + 4 * step + np.arange(count) for count in counts]))
        reports = []
        for is_fused, sampler in zip((True, False), samplers, strict=True):
            drafts = StepDrafts()
            for index, row in enumerate(rows[1:], 1):
                drafts.add(index, row, range(firsts[index], firsts[index] + counts[index]), Source.LOOKUP, (0, 0))
            at = positions.to(DEVICE)
            if is_fused:
                sampled = sampler.verify_independently(logits, rows, counts, at)
            else:
                zeros = [[0] * width for width in widths]
                sampled = sampler.verify(logits, rows, [0] * 3, zeros, None, drafts, at)
            report = sampler.device_drafts.advance(drafts, sampled.token_ids, sampled.bad, None)
            reports.append((sampled.to_host(), report))
        (one, found), (other, expected) = reports
        assert one.token_ids == other.token_ids and repr(one.logprobs) == repr(other.logprobs)
        assert torch.equal(found, expected)
        for name in ("last_tokens", "device_tokens"):
            assert torch.equal(getattr(samplers[0], name), getattr(samplers[1], name))
        assert torch.equal(samplers[0].device_drafts.num_accepted, samplers[1].device_drafts.num_accepted)
        assert torch.equal(samplers[0]._state.counts.table, samplers[1]._state.counts.table)
        num_accepted += int(samplers[0].device_drafts.num_accepted.sum())
    assert num_accepted > 4
