"""Published acceptance, and the counts of a draft model with a chosen acceptance against the replay oracle's."""

from collections.abc import Iterator

import pytest

from benchmarks.models import random_llama
from benchmarks.speculation import published
from benchmarks.speculation.synthetic_draft import ForcedAcceptance
from tests.endurance import published_acceptance
from tests.endurance.published_acceptance import Pair, tally
from tests.oracles.replay import NOTHING, Chain, Counts, Text, replay
from tests.shard.engine import harness

TEXT = 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    patch = pytest.MonkeyPatch()
    patch.setattr(random_llama, "MODELS", tmp_path_factory.mktemp("models"))
    yield Pair(5, TEXT)
    patch.undo()


@pytest.fixture(scope="module")
def full_pair() -> Pair:
    return Pair(published_acceptance.AT_ONCE)


@pytest.mark.long
@pytest.mark.parametrize("width", published.LMFLOW_FORWARDS)
def test_tokens_per_forward_are_those_that_lmflow_publishes(full_pair: Pair, width: int) -> None:
    counts = published_acceptance.forwards(full_pair, width)
    assert counts["tokens"] >= published_acceptance.TOKENS
    assert published_acceptance.forwards_error(width, counts) <= 0.05


@pytest.mark.long
def test_the_share_of_accepted_drafts_is_the_one_that_xinference_publishes(full_pair: Pair) -> None:
    counts = published_acceptance.accepted(full_pair)
    assert counts["drafted"] >= published_acceptance.DRAFTED
    assert published_acceptance.accepted_error(counts) <= 0.003


@pytest.mark.parametrize(
    ("chance", "width"),
    [
        (0.0, 3),
        (0.7, 4),
        pytest.param(1.0, 3, marks=pytest.mark.long),
        pytest.param(0.7, 1, marks=pytest.mark.long),
        pytest.param(0.9, 10, marks=pytest.mark.long),
    ],
)
def test_counts_are_the_oracles(pair: Pair, chance: float, width: int) -> None:
    runs = pair.run(chance, width, 8, round=2)
    found = sum((Counts(len(r.token_ids), len(r.steps), *_drafts(r), 1) for r in runs), NOTHING)
    accepted, oracle = ForcedAcceptance(chance, pair.recorded, 2), NOTHING
    for number, run in enumerate(runs):
        ids = pair.recorded[number % 5]
        right = accepted.right(number, len(ids))
        best = [ids[place] if right[place] else -1 for place in range(published_acceptance.PROMPT, len(ids))]
        oracle += replay(Text(tuple(run.wanted.prompt_ids), tuple(run.token_ids), TEXT), Chain(best), width)
    assert found == oracle
    assert found.accepted == (found.drafted if chance == 1 else 0 if chance == 0 else found.accepted)


def test_only_steps_with_all_drafts_are_counted(pair: Pair) -> None:
    counts = tally(pair.run(1.0, 3, 5, round=0), 3)
    # 1, then 9 steps of four; for the last three tokens two drafts have room
    assert counts == {
        "texts": 5, "tokens": 5 * 36, "forwards": 5 * 9, "drafted": 5 * 27, "accepted": 5 * 27,
        "all_tokens": 5 * TEXT, "all_forwards": 5 * 11,
    }  # fmt: skip


def test_distances_from_published_values() -> None:
    row = {"tokens": 4600, "forwards": 1000, "accepted": 870, "drafted": 1000}
    assert published_acceptance.forwards_error(4, row) == pytest.approx(0.03)
    assert published_acceptance.accepted_error(row) == pytest.approx(0.01)


def _drafts(run: harness.Run) -> tuple[int, int]:
    return sum(step.num_drafted for step in run.steps), sum(step.num_accepted for step in run.steps)
