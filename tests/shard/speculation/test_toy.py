"""A source that exists in tests only takes part in the batch: one file with its drafter, and one row."""

from collections.abc import Iterator

import numpy as np
import pytest

from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.proto.params import Method, Schedule, Speculation
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.rig import Rig, Setup, make_request
from tests.toy_source import TOY, ToyDrafter, registered


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("schedule", [Schedule.CONSTANT, Schedule.HEURISTIC])
def test_its_tokens_are_verified_counted_and_named_like_all_others(schedule: Schedule) -> None:
    speculation = Speculation(Method.AUTO, 3, schedule=schedule)
    alone = Rig().run(make_request(1, [1, 2, 3], 40))[1]
    drafter = Rig(Setup(drafts=DraftSettings(further=(ToyDrafter,))))
    ToyDrafter.texts = {1: [1, 2, 3, *alone.token_ids], 2: [4] * 50}
    requests = [make_request(n, [1, 2, 3], 40, speculation=speculation) for n in (1, 2)]
    outputs = drafter.run(*requests)
    right, wrong = outputs[1], outputs[2]
    assert right.token_ids == wrong.token_ids == alone.token_ids
    place = list(BY_VALUE).index(TOY.value)
    assert right.num_drafted[place] == sum(right.num_drafted) > 20
    assert right.num_accepted == right.sources.count(TOY.value) > 15
    assert wrong.num_accepted < 3 < wrong.num_drafted[place]


def test_its_draft_length_is_learned() -> None:
    speculation = Speculation(Method.AUTO, 3, schedule=Schedule.AUTO)
    drafter = Rig(Setup(drafts=DraftSettings(further=(ToyDrafter,))))
    ToyDrafter.texts = {1: [4] * 250}
    output = drafter.run(make_request(1, [1, 2, 3], 200, speculation=speculation))[1]
    assert sum(output.num_drafted) > 0
    draft_length = drafter.scheduler.proposer.draft_length
    [(kind, group)] = draft_length._groups.items()
    assert kind == ("", TOY.value, False)
    assert draft_length.states.prior_rates(np.array([group]))[0, 0] < 0.8 * (TOY.prior or 0)
