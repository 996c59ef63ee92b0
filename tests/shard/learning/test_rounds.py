"""Parts of a round of training: the labels that are candidates, its limited time, and the replay head by head."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.adapters.formats.base_model import BaseValues, Skeleton
from lorikeet.adapters.formats.heads import MedusaHeads, MedusaShape
from lorikeet.adapters.medusa import learning as module
from lorikeet.adapters.medusa import training
from lorikeet.adapters.medusa.learning import (
    BUSY_SHARE,
    CANDIDATE_SHARE,
    BaseHead,
    HeldOut,
    Rounds,
    Throttle,
    _candidates,
)
from lorikeet.adapters.medusa.texts import NOTHING
from lorikeet.proto.learning import RowsLayout, TrainerSettings, TrainingJob
from lorikeet.shard.learning.learning import Rings
from tests import tiny

NUM_HEADS = 3
PAIR = ("one", "")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def head(base: Path) -> BaseHead:
    skeleton = Skeleton(base, False)
    return BaseHead(skeleton, BaseValues(skeleton), torch.float32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([NOTHING, 3, 5, 8, 1000]), min_size=6, max_size=60))
def test_candidates_are_the_most_frequent_labels(values: list[int]) -> None:
    labels = torch.tensor(values[: len(values) // 3 * 3]).reshape(-1, 3)
    candidates, found = _candidates(labels)
    known = labels != NOTHING
    assert (found[~known] == NOTHING).all()
    kept = found != NOTHING
    assert torch.equal(candidates[found[kept]], labels[kept])
    assert kept.sum() >= CANDIDATE_SHARE * known.sum()
    assert len(candidates.unique()) == len(candidates)


def test_a_rare_label_is_no_candidate() -> None:
    labels = torch.tensor([7] * 200 + [9]).reshape(-1, 1)
    candidates, found = _candidates(labels)
    assert candidates.tolist() == [7]
    assert found.flatten().tolist() == [0] * 200 + [NOTHING]


def test_logits_of_candidates_are_those_of_the_whole_vocabulary(head: BaseHead) -> None:
    rows, token_ids = torch.randn(5, head.hidden_size), torch.tensor([9, 2, 30])
    torch.testing.assert_close(head.logits_of(token_ids)(rows), head.logits(rows)[:, token_ids])


@pytest.mark.parametrize("has_matrices", [False, True])
def test_a_replay_head_by_head_equals_one_of_all_proposals(head: BaseHead, has_matrices: bool) -> None:
    generator, random = torch.Generator().manual_seed(0), Random(0)
    shape = MedusaShape(NUM_HEADS, 2, head.hidden_size, head.vocab_size if has_matrices else None)
    heads = MedusaHeads(shape)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    rows = torch.randn(400, head.hidden_size, generator=generator).to(torch.bfloat16)
    proposals = heads.propose(rows, head.logits, head.vocab_size)
    output_ids, first = [], 0
    for count in (1, 2, 150, 247):
        ids = torch.randint(0, head.vocab_size, (count,), generator=generator).tolist()
        for at in range(1, count):  # each token is the draft of one of the heads
            number = min(at - 1, random.choice([0, 0, 0, 1, 2]))
            ids[at] = int(proposals[first + at - 1 - number, number])
        output_ids.append(ids)
        first += count
    tokens = steps = first = 0
    for ids in output_ids:
        chain = training.replay(ids, proposals[first : first + len(ids)].tolist())
        tokens, steps, first = tokens + chain.tokens, steps + chain.steps, first + len(ids)
    found = module._tokens_per_step(heads, HeldOut(rows, output_ids), head, Throttle())
    assert found == tokens / steps > 1.2


def test_a_round_ends_in_time(base: Path, head: BaseHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time there is no step: the heads propose what untrained ones do."""
    rings = Rings(RowsLayout.within(1 << 20, head.hidden_size))
    random = np.random.default_rng(0)
    for text in range(20):
        noise = random.integers(0, 64, (64, head.hidden_size)).astype(np.uint16)
        hidden = np.full(noise.shape, 0x3F80, np.uint16) ^ noise
        rings.append(PAIR, [text] * 64, [at % 5 + 3 for at in range(64)], hidden)
    found = {}
    for seconds in (0.0, 60.0):
        monkeypatch.setattr(module, "ROUND_S", seconds or 1e-9)
        store = str(tmp_path / str(seconds))
        rounds = Rounds(
            TrainerSettings(str(base), False, "float32", store, 1 << 30, rings.fd, rings.layout), lambda: False
        )
        rounds.prepare()
        answer = rounds.do(TrainingJob(PAIR, rings.blocks(PAIR), 10**6, "", 0.0))
        assert answer.decision.decision == "adopted"
        found[seconds] = any(bool(weight.any()) for weight in rounds._pairs[PAIR].heads.weights)
    assert found == {0.0: False, 60.0: True}


class Clocks:
    """In place of the module `time`: a step of several threads, and the sleep after it."""

    def __init__(self, num_threads: int) -> None:
        self.wall = self.cpu = self.slept = 0.0
        self._num_threads = num_threads

    def monotonic(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu

    def process_time(self) -> float:
        return self.cpu * self._num_threads

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.slept += seconds


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize(("wall", "is_busy"), [(0.010, False), (0.011, False), (0.015, True), (0.100, True)])
def test_training_takes_little_of_a_busy_processor(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, wall: float, is_busy: bool
) -> None:
    clocks = Clocks(num_threads)
    monkeypatch.setattr(module, "time", clocks)
    throttle = Throttle()
    for _ in range(100):
        clocks.wall += wall
        clocks.cpu += 0.010
        throttle.wait()
    assert (clocks.slept > 0) == is_busy
    assert (clocks.process_time() / clocks.wall <= 1.001 * BUSY_SHARE) == is_busy


def test_training_that_others_keep_from_running_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(1)
    monkeypatch.setattr(module, "time", clocks)
    throttle = Throttle()
    clocks.wall, clocks.cpu = 10.0, 0.01
    throttle.wait()
    assert clocks.slept == 0


def test_a_replay_is_throttled_too(head: BaseHead, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[Throttle]()

    def count(throttle: Throttle) -> None:
        waits.append(throttle)

    monkeypatch.setattr(Throttle, "wait", count)
    heads = MedusaHeads(MedusaShape(NUM_HEADS, 1, head.hidden_size))
    rows = torch.randn(3 * module.PROPOSED_ROWS, head.hidden_size).to(torch.bfloat16)
    module._tokens_per_step(heads, HeldOut(rows, [[1] * len(rows)]), head, Throttle())
    assert len(waits) >= 3
