"""The dialled draft: right where its dial says so, through the engine's own planning, passes and counts."""

from collections.abc import Iterator

import pytest

from benchmarks import dialled, harness
from benchmarks.dial import Dial, Pair
from benchmarks.dialled import tally
from benchmarks.replay import NOTHING, Chain, Counts, Text, replay

TEXT = 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    patch = pytest.MonkeyPatch()
    patch.setattr(harness, "MODELS", tmp_path_factory.mktemp("models"))
    yield Pair(5, TEXT)
    patch.undo()


@pytest.mark.parametrize(("chance", "width"), [(1.0, 3), (0.0, 3), (0.7, 1), (0.7, 4), (0.9, 10)])
def test_counts_are_the_oracle_s(pair: Pair, chance: float, width: int) -> None:
    runs = pair.run(chance, width, 8, round=2)
    found = sum((Counts(len(r.token_ids), len(r.steps), *_drafts(r), 1) for r in runs), NOTHING)
    dial, oracle = Dial(chance, pair.recorded, 2), NOTHING
    for number, run in enumerate(runs):
        ids = pair.recorded[number % 5]
        right = dial.right(number, len(ids))
        best = [ids[place] if right[place] else -1 for place in range(dialled.PROMPT, len(ids))]
        oracle += replay(Text(tuple(run.wanted.prompt_ids), tuple(run.token_ids), TEXT), Chain(best), width)
    assert found == oracle
    assert found.accepted == (found.drafted if chance == 1 else 0 if chance == 0 else found.accepted)


def test_only_steps_that_drafted_in_full_are_tallied(pair: Pair) -> None:
    runs = pair.run(1.0, 3, 5, round=0)
    told = tally(runs, 3)
    # 1, then 9 steps of four; for the last three tokens two drafts have room
    assert told == {
        "texts": 5, "tokens": 5 * 36, "forwards": 5 * 9, "drafted": 5 * 27, "accepted": 5 * 27,
        "all_tokens": 5 * TEXT, "all_forwards": 5 * 11,
    }  # fmt: skip


def test_distances_from_what_is_published() -> None:
    row = {"width": 4, "tokens": 4600, "forwards": 1000, "accepted": 870, "drafted": 1000}
    assert dialled.off_published(row) == pytest.approx(0.03)
    assert dialled.off_share(row) == pytest.approx(0.01)


def _drafts(run: harness.Run) -> tuple[int, int]:
    return sum(gave.num_drafted for gave in run.steps), sum(gave.num_accepted for gave in run.steps)
