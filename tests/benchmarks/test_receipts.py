"""The requests of `benchmarks.receipts` are as mixed as they are said to be, and what differs is counted."""

import json
import random
from collections import Counter

import pytest

from benchmarks import receipts
from benchmarks.receipts import ADAPTERS, METHODS, RECEIPTS, ROUTES, differences, num_different, wanted
from lorikeet.launcher.cli.receipt import Receipt
from tests.launcher.cli.test_client import Told, serving
from tests.launcher.cli.test_replay import receipt


def test_a_case_holds_every_kind() -> None:
    draw = random.Random(receipts.SEED)
    asked = [wanted(draw, number) for number in range(RECEIPTS)]
    assert len({repr(each) for each in asked}) > 0.9 * RECEIPTS
    fields = [body.get("parameters", body) for _, body in asked]
    assert set(Counter(route for route, _ in asked)) == set(ROUTES)
    pairs = Counter((each["speculative_method"], each.get("adapter_id") or each.get("model")) for each in fields)
    assert len(pairs) >= len(METHODS) * len(ADAPTERS)
    assert {each.get("seed") is None for each in fields} == {True, False}
    assert {each["temperature"] == 0 for each in fields} == {True, False}


@pytest.mark.parametrize(("again", "said"), [([4, 5, 6, 7], []), ([4, 5], ["different from token 2 on"])])
def test_what_does_not_come_again_is_counted(again: list[int], said: list[str]) -> None:
    given = [Receipt.read(receipt()) for _ in range(3)]
    with serving(Told(body=json.dumps({"receipt": receipt(output=again)}).encode())) as client:
        found = differences(client, given)
    assert [line.partition(":")[0] for line in found] == said * 3
    raw = {"receipts": 3, "different_on_replicas": found, "different_elsewhere": []}
    assert num_different(raw) == RECEIPTS - 3 + len(found)
