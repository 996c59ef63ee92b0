"""The benchmark of learned heads: what it sends, and the time of each token."""

import orjson
import pytest

from benchmarks.speculation import learning
from lorikeet.launcher.bench.load import Sample, Seen


def test_tokens_that_arrive_together_have_equal_parts_of_the_time() -> None:
    sample = Sample(learning.NumberedRequest("prompt", 6), 0.0, itls=[0.0, 0.3, 0.0, 0.0, 0.2])
    assert learning.token_seconds(sample) == pytest.approx([0.1, 0.1, 0.1, 0.2])


def test_an_answer_is_its_token_ids_with_a_time_each() -> None:
    api, seen = learning.TokenIds("", {}, ignores_eos=True), Seen()
    for id, skipped in ((7, False), (8, True)):
        api.read(orjson.dumps({"token": {"id": id, "text": "x", "skipped": skipped}}), 1.0, seen)
    assert ("".join(seen.texts), seen.token_times) == ("7 8 ", [1.0, 1.0])


def test_one_of_four_requests_is_sampled() -> None:
    api = learning.TokenIds("", {}, ignores_eos=True)
    plan = learning._requests(["a", "b", "c", "d"], 4, [0.5, 1.0, 1.5, 2.0])
    sampled = [api.body(request)["parameters"].get("do_sample", False) for request in plan]
    assert sampled == [True, False, False, False] and [request.at for request in plan] == [0.5, 1.0, 1.5, 2.0]
