"""Heads learned while serving: better ones are adopted between steps, worse ones reverted, and texts do not change."""

from pathlib import Path

import pytest

from lorikeet.shard.learning import learning as module
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.scheduler.speculation.types import Source
from tests.shard.learning import learners
from tests.shard.learning.learners import PROMPT_IDS, DirectTrainer, Learner, tokens_per_step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(learners.config_of(tmp_path_factory.mktemp("store")))


@pytest.fixture
def learner(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Learner:
    monkeypatch.setattr("lorikeet.shard.startup.build.Trainer", DirectTrainer)
    monkeypatch.setattr(module, "MIN_ROWS", 400)
    return learners.make(model, learners.config_of(tmp_path))


def test_heads_are_learned_adopted_and_change_no_text(learner: Learner) -> None:
    before = learner.run(PROMPT_IDS)
    assert tokens_per_step(before) == 1.0
    learner.run(PROMPT_IDS)
    pair = learner.ask().pairs[0]
    assert (pair.tenant, pair.adapter_digest, pair.num_rows) == ("one", "", 24 * 48)
    after = learner.run(PROMPT_IDS)
    assert [output.token_ids for output in after] == [output.token_ids for output in before]
    assert tokens_per_step(after) > 1.5
    assert sum(output.sources.count(Source.MEDUSA) for output in after) > 50
    learner.end()
