"""Heads learned while serving: better ones are adopted between steps, worse ones reverted, and texts do not change."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorikeet.adapters.formats.base_model import BaseValues, Skeleton
from lorikeet.adapters.medusa.learning import BaseHead
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.learning import Trained, row_indices
from lorikeet.proto.params import Schedule, Speculation
from lorikeet.shard.grpc.streams import Output
from lorikeet.shard.learning import learning as module
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.requests.request import Source
from tests.shard.learning import learners
from tests.shard.learning.learners import HEADS, PROMPT_IDS, DirectTrainer, Learner, tokens_per_step

Make = Callable[[], Learner]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(learners.config_of(tmp_path_factory.mktemp("store")))


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.shard.startup.build.Trainer", DirectTrainer)
    monkeypatch.setattr(module, "MIN_ROWS", 400)
    monkeypatch.setattr(module, "MAX_WAITS", 1)


@pytest.fixture
def make(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Starts a shard; all of one test share their adapter store."""
    prepare(monkeypatch)
    return lambda: learners.make(model, learners.config_of(tmp_path))


@dataclass
class Learned:
    """What a shard has learned."""

    store: Path
    runs: list[list[Output]]
    """The same requests again and again."""
    reply: pb.LearningReply


@pytest.fixture(scope="module")
def learned(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """A shard has adopted heads for the tenant `one` and has ended."""
    store, runs = tmp_path_factory.mktemp("learned"), list[list[Output]]()
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        learner = learners.make(model, learners.config_of(store))
        while not (runs and tokens_per_step(runs[-1]) > 1.3):
            assert len(runs) < 8, "nothing was adopted"
            runs.append(learner.run(PROMPT_IDS))
        reply = learner.ask()
        learner.end()
    return Learned(store, runs, reply)


@pytest.fixture
def learner(learned: Learned, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Learner:
    """The next shard over the same store, which trains nothing."""
    shutil.copytree(learned.store, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(module, "MIN_ROWS", 10**6)
    return make()


def num_from_heads(shard: Learner, **values: Any) -> int:
    return sum(output.sources.count(Source.MEDUSA) for output in shard.run(PROMPT_IDS, **values))


def stored(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def test_heads_are_learned_from_rows_and_adopted(learned: Learned) -> None:
    assert tokens_per_step(learned.runs[0]) < 1.3 < tokens_per_step(learned.runs[-1])
    assert len({repr([output.token_ids for output in run]) for run in learned.runs}) == 1
    (pair,) = learned.reply.pairs
    num_rows = sum(len(output.token_ids) for run in learned.runs for output in run)
    assert (pair.tenant, pair.adapter_digest, pair.num_rows, pair.num_collected) == ("one", "", num_rows, num_rows)
    decision = next(each for each in pair.decisions if each.decision == "adopted")
    assert decision.tokens_per_step >= 1.02 * decision.tokens_per_step_before
    assert learned.reply.totals.num_adopted >= 1 and learned.reply.totals.num_rows == num_rows


def test_texts_are_the_same_while_heads_are_swapped_under_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are adopted for the first time in the middle of running requests, greedy and sampled, and purged again."""
    monkeypatch.setattr(module, "MIN_ROWS", 10**6)
    plain, learner = make(), make()
    groups: list[dict[str, Any]] = [{}, {"sampling": learners.sampled(7)}]
    expected = [each.token_ids for values in groups for each in plain.run(PROMPT_IDS[:8], 70, learner="", **values)]
    for _ in range(2):
        learner.run(PROMPT_IDS)
    numbers = [number for values in groups for number in learner.submit(PROMPT_IDS[:8], 70, **values)]
    learner.turn(lambda: all(n in learner.outputs and len(learner.outputs[n].token_ids) > 10 for n in numbers))
    monkeypatch.setattr(module, "MIN_ROWS", 400)
    learner.turn(lambda: bool(learner.learning.pairs["one", ""].state.heads_digest))
    monkeypatch.setattr(module, "MIN_ROWS", 10**6)
    learner.turn(lambda: sum(learner.outputs[number].sources.count(Source.MEDUSA) for number in numbers) > 10)
    assert not all(learner.outputs[number].finish_reason for number in numbers)
    learner.ask(purge=True)
    learner.turn(lambda: all(learner.outputs[number].finish_reason for number in numbers))
    assert [learner.outputs[number].token_ids for number in numbers] == expected
    sources = [learner.outputs[number].sources for number in numbers]
    assert all(Source.MEDUSA not in each[:10] for each in sources)  # they began without heads
    learner.end()
    plain.end()


@pytest.mark.parametrize(
    "values",
    [
        {"learner": "two"},
        pytest.param({"learner": ""}, marks=pytest.mark.long),
        pytest.param({"speculation": replace(HEADS, num_heads=0)}, marks=pytest.mark.long),
    ],
)
def test_only_the_tenant_that_heads_were_learned_from_uses_them(learner: Learner, values: dict[str, Any]) -> None:
    assert num_from_heads(learner, **values) == 0
    assert num_from_heads(learner) > 20
    learner.end()


def test_a_schedule_chooses_the_number_of_drafts(learned: Learned, learner: Learner) -> None:
    found = learner.run(PROMPT_IDS, speculation=Speculation(HEADS.method, 0, 255, Schedule.AUTO))
    assert [output.token_ids for output in found] == [output.token_ids for output in learned.runs[0]]


def test_adopted_heads_and_decisions_survive_a_restart_and_rows_do_not(learned: Learned, learner: Learner) -> None:
    assert set(stored(learned.store)) == {".json", ".safetensors"}
    assert num_from_heads(learner) > 20
    (before,), (pair,) = learned.reply.pairs, learner.ask().pairs
    assert pair.heads_digest == before.heads_digest
    assert pair.num_rows == pair.num_collected < before.num_rows
    assert list(pair.decisions) == list(before.decisions)
    learner.end()


def test_a_purge_deletes_rows_heads_and_decisions(learned: Learned, learner: Learner, tmp_path: Path) -> None:
    (pair,) = learner.ask().pairs
    scheduler = learner.engine.scheduler
    learner.run(PROMPT_IDS)
    assert scheduler.adapters.slot(pair.heads_digest) >= 0
    numbers = learner.submit(PROMPT_IDS)
    learner.turn(lambda: len(learner.outputs) > numbers[-1])
    reply = learner.ask(purge=True)
    assert not reply.pairs and reply.totals.ring_bytes == 0
    assert not list(scheduler.learned_heads)
    assert stored(tmp_path) == []
    learner.turn(lambda: all(learner.outputs[number].finish_reason for number in numbers))
    outputs = [learner.outputs[number] for number in numbers]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in learned.runs[0]]
    assert num_from_heads(learner) == 0
    assert scheduler.adapters.slot(pair.heads_digest) < 0
    learner.end()


def test_heads_that_do_worse_than_those_before_are_reverted(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REVERT_STEPS", 20)
    pair = learner.learning.pairs["one", ""].state
    dropped, pair.replaced_acceptance = pair.heads_digest, 2.0
    for _ in range(3):
        learner.run(PROMPT_IDS)
    assert pair.heads_digest != dropped
    assert (pair.decisions[-1].decision, pair.decisions[-1].heads_digest) == ("reverted", dropped)
    assert "for 20 steps in a row" in pair.decisions[-1].reason
    learner.learning._records.flush()
    assert not (tmp_path / f"{dropped}.safetensors").exists()
    learner.end()


def test_heads_whose_file_is_damaged_are_dropped_and_no_request_fails(
    learned: Learned, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_ROWS", 10**6)
    shutil.copytree(learned.store, tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"{learned.reply.pairs[0].heads_digest}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    learner = make()
    found = learner.run(PROMPT_IDS)
    assert [output.token_ids for output in found] == [output.token_ids for output in learned.runs[0]]
    (pair,) = learner.ask().pairs
    assert (pair.heads_digest, pair.decisions[-1].decision) == ("", "failed")
    learner.end()


class Scripted(DirectTrainer):
    """Answers when the test lets it."""

    def train(self, job: object) -> None:
        self.jobs.append(job)  # type: ignore[arg-type]

    @property
    def state(self) -> str:
        return "training" if len(self.jobs) > self.num_answers else "idle"

    num_answers = 0

    def end_job(self, decision: str, reason: str) -> None:
        self.num_answers += 1
        self._result = Trained(self.jobs[-1].pair, pb.LearningDecision(decision=decision, reason=reason), 0.0)


@pytest.mark.long
def test_pairs_take_turns_and_wait_longer_after_trainings_without_a_gain(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.shard.startup.build.Trainer", Scripted)
    monkeypatch.setattr(module, "MIN_ROWS", 100)
    monkeypatch.setattr(module, "MAX_WAITS", 4)
    learner = make()
    trainer = learner.learning.trainer
    assert isinstance(trainer, Scripted)
    for _ in range(3):  # `flood` has three times the rows of `one`
        learner.run(PROMPT_IDS[:6], learner="flood")
    learner.run(PROMPT_IDS[:6])
    assert len(trainer.jobs) == 1  # one at a time
    trainer.end_job("rejected", "no gain")
    learner.run(PROMPT_IDS[:1], 4, learner="")
    trainer.end_job("failed", "it broke")
    learner.run(PROMPT_IDS[:1], 4, learner="")
    flood, one = (learner.learning.pairs[tenant, ""] for tenant in ("flood", "one"))
    assert [job.pair for job in trainer.jobs[:2]] == [flood.key, one.key]
    assert trainer.jobs[1].num_new == 6 * 40
    assert flood.num_waits == one.num_waits == 2
    decisions = flood.state.decisions[0], one.state.decisions[0]
    assert [each.decision for each in decisions] == ["rejected", "failed"]
    assert decisions[1].reason == "it broke"
    learner.end()


def test_each_row_gives_its_token(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of requests of two tenants and of one that takes no part, at different positions."""
    monkeypatch.setattr(module, "MIN_ROWS", 10**6)
    learner = make()
    numbers: list[int] = []
    for index, ids in enumerate(PROMPT_IDS[:9]):
        numbers += learner.submit([ids], 30, learner=("", "one", "two")[index % 3])
        learner.engine.step()
    learner.turn(lambda: all(n in learner.outputs and learner.outputs[n].finish_reason for n in numbers))
    skeleton = Skeleton(learners.BASE, False)
    head, arrays = BaseHead(skeleton, BaseValues(skeleton), torch.float32), learner.learning.rings._rows
    for first, tenant in ((1, "one"), (2, "two")):
        rows = row_indices(learner.learning.rings.blocks((tenant, "")))
        found = torch.from_numpy(arrays["hidden"][rows].view(np.int16)).view(torch.bfloat16)
        token_ids = torch.from_numpy(arrays["token_id"][rows]).long()
        texts = [learner.outputs[number].token_ids for number in numbers[first::3]]
        assert sorted(token_ids.tolist()) == sorted(token_id for text in texts for token_id in text)
        is_same = head.logits(found).argmax(-1) == token_ids  # but for ties, since the rows are rounded
        assert is_same.float().mean() > 0.95
    learner.end()
