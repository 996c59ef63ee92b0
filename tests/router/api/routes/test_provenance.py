"""The source of each token and the counts of speculation, in answers, streams, headers, usage and metrics."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from lorikeet.proto import shard_pb2 as pb
from tests.router.api.routes.test_native import generate
from tests.router.api.routes.test_openai import BOTH
from tests.router.scripted_shard import Script
from tests.router.serving import Serving

pytestmark = pytest.mark.anyio

PREFILL, TARGET, LOOKUP, MEDUSA, DRAFT, RESAMPLE, BONUS = range(7)
NAMES = ("prefill", "target", "lookup", "medusa", "draft", "resample", "bonus")


def step(
    text: Sequence[int], sources: Sequence[int], drafted: Sequence[int] = (), accepted: int = 0
) -> pb.RequestOutput:
    """The output of one step: its tokens, all with their sources, and the counts of its draft tokens."""
    assert len(text) == len(sources)
    output = pb.RequestOutput(token_ids=text, sources=bytes(sources), step_ends=bytes([0] * (len(text) - 1) + [1]))
    output.logprobs.extend([-0.5] * len(text))
    if drafted:
        output.num_drafted.extend(drafted)
        output.num_accepted = accepted
        output.draft_seconds, output.verify_seconds, output.accept_seconds = 0.25, 0.5, 0.125
    return output


def coalesced(*steps: pb.RequestOutput) -> pb.RequestOutput:
    """Several steps as one message, as a shard sends them while its stream is slow."""
    whole = pb.RequestOutput()
    for step in steps:
        drafted = [a + b for a, b in zip(whole.num_drafted or [0] * 3, step.num_drafted or [0] * 3, strict=True)]
        for name in ("num_accepted", "draft_seconds", "verify_seconds", "accept_seconds"):
            setattr(whole, name, getattr(whole, name) + getattr(step, name))
        for name in ("sources", "step_ends"):
            setattr(whole, name, getattr(whole, name) + getattr(step, name))
        whole.token_ids.extend(step.token_ids)
        whole.logprobs.extend(step.logprobs)
        del whole.num_drafted[:]
        whole.num_drafted.extend(drafted)
    return whole


def steps_of_nine_tokens(server: Serving) -> list[pb.RequestOutput]:
    """A text of nine tokens whose steps cover every outcome of draft tokens."""
    a, b, c, d, e, f, g, h, i = server.ids("abcdefghi")
    last = step([h, i], [DRAFT, DRAFT], [0, 0, 4], 2)
    last.finish_reason = pb.FINISH_LENGTH
    return [
        step([a], [PREFILL]),
        step([b], [TARGET]),
        coalesced(step([c, d], [LOOKUP, BONUS], [1, 0, 0], 1), step([e], [RESAMPLE], [0, 2, 0], 0)),
        step([f, g], [MEDUSA, RESAMPLE], [0, 3, 0], 1),
        last,
    ]


SOURCES = [PREFILL, TARGET, LOOKUP, BONUS, RESAMPLE, MEDUSA, RESAMPLE, DRAFT, DRAFT]
SKIPPED = [False, False, False, True, False, False, True, False, True]
REPORT = {
    "method": "auto",
    "verification": "shared-noise",
    "verify": "shared-noise",
    "steps": 6,
    "drafted": 10,
    "accepted": 4,
    "resampled": 2,
    "bonus": 1,
    "draft_seconds": 1.0,
    "verify_seconds": 2.0,
    "accept_seconds": 0.5,
    "sources": {"prefill": 1, "target": 1, "lookup": 1, "medusa": 1, "draft": 2, "resample": 2, "bonus": 1},
}


def script(server: Serving) -> None:
    server.shard.answer = lambda submit: Script((), outputs=steps_of_nine_tokens(server))


async def test_every_token_has_one_source_and_details_sum_them(server: Serving) -> None:
    script(server)
    parameters = {"max_new_tokens": 9, "details": True, "speculative_tokens": 4}
    response = await server.client.post("/generate", json={"inputs": "Hi", "parameters": parameters})
    details = response.json()["details"]
    assert [token["source"] for token in details["tokens"]] == [NAMES[source] for source in SOURCES]
    assert [token["skipped"] for token in details["tokens"]] == SKIPPED
    assert details["speculation"] == REPORT
    assert sum(details["speculation"]["sources"].values()) == details["generated_tokens"] == 9
    assert details["skipped_tokens"] == 3
    assert response.headers["x-skipped-tokens"] == "3"
    assert details["speculation"]["steps"] == 9 - 3


async def test_a_stream_reports_the_same(server: Serving) -> None:
    script(server)
    parameters = {"max_new_tokens": 9, "details": True, "speculative_tokens": 4}
    events = await server.events("/generate_stream", {"inputs": "Hi", "parameters": parameters})
    assert [event["token"]["source"] for event in events] == [NAMES[source] for source in SOURCES]
    assert [event["token"]["skipped"] for event in events] == SKIPPED
    assert events[-1]["details"]["speculation"] == REPORT


async def test_openais_usage_reports_the_same(server: Serving) -> None:
    expected = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 6, "speculation": REPORT}
    for path, body in BOTH:
        script(server)
        asked = {**body, "max_tokens": 9, "speculative_tokens": 4}
        response = await server.client.post(path, json=asked)
        assert response.json()["usage"]["completion_tokens_details"] == expected
        assert response.headers["x-skipped-tokens"] == "3"
        events = await server.events(path, {**asked, "stream": True, "stream_options": {"include_usage": True}})
        assert events[-2]["usage"]["completion_tokens_details"] == expected


async def test_several_choices_are_counted_together(server: Serving) -> None:
    for path, body in BOTH:
        script(server)
        response = await server.client.post(path, json={**body, "n": 2, "max_tokens": 9, "speculative_tokens": 4})
        report = response.json()["usage"]["completion_tokens_details"]["speculation"]
        assert (report["steps"], report["drafted"], report["accepted"]) == (12, 20, 8)
        assert sum(report["sources"].values()) == response.json()["usage"]["completion_tokens"] == 18


@pytest.mark.parametrize(
    ("stop", "num_tokens", "accepted", "drafted"),
    [("bc", 3, 1, 3), ("d", 4, 1, 3), ("f", 6, 2, 6), ("h", 8, 3, 10)],
    ids=["inside a block, in a message of two steps", "at a bonus", "at an accepted draft", "before the last draft"],
)
async def test_tokens_cut_off_by_a_stop_string_are_not_counted(
    server: Serving, stop: str, num_tokens: int, accepted: int, drafted: int
) -> None:
    script(server)
    parameters = {"max_new_tokens": 9, "details": True, "speculative_tokens": 4, "stop": [stop]}
    details = (await generate(server, **parameters))["details"]
    report = details["speculation"]
    assert details["generated_tokens"] == len(details["tokens"]) == num_tokens
    assert report["sources"] == dict(Counter(NAMES[source] for source in SOURCES[:num_tokens]))
    assert sum(report["sources"].values()) == num_tokens
    assert (report["accepted"], report["drafted"]) == (accepted, drafted)
    assert details["skipped_tokens"] == sum(SKIPPED[:num_tokens])
    assert report["steps"] == num_tokens - details["skipped_tokens"]


async def test_an_accepted_draft_that_is_the_first_token_is_a_prefill_and_counted(server: Serving) -> None:
    output = step(server.ids("ab"), [PREFILL, BONUS], [1, 0, 0], 1)
    output.finish_reason = pb.FINISH_LENGTH
    server.shard.answer = lambda submit: Script((), outputs=[output])
    details = (await generate(server, max_new_tokens=2, details=True, speculative_tokens=4))["details"]
    assert details["speculation"]["accepted"] == 1
    assert details["speculation"]["sources"] == {"prefill": 1, "bonus": 1}


async def test_there_is_no_report_without_speculation(server: Serving) -> None:
    server.says(" there!")
    for own in ({}, {"speculative_tokens": 0}, {"speculative_method": "off"}):
        assert "speculation" not in (await generate(server, max_new_tokens=2, details=True, **own))["details"]
        events = await server.events(
            "/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "details": True, **own}}
        )
        assert "speculation" not in events[-1]["details"]
        for path, body in BOTH:
            usage: dict[str, Any] = (await server.client.post(path, json={**body, "max_tokens": 2, **own})).json()[
                "usage"
            ]
            assert "completion_tokens_details" not in usage


async def test_the_report_has_zeros_without_draft_tokens(server: Serving) -> None:
    server.says(" there!")
    report = (await generate(server, max_new_tokens=2, details=True, speculative_tokens=3))["details"]["speculation"]
    assert (report["steps"], report["drafted"], report["accepted"]) == (2, 0, 0)
    assert report["sources"] == {"target": 2}


async def test_metrics_count_the_tokens_of_texts(server: Serving) -> None:
    script(server)

    def count(name: str, method: str) -> float:
        return server.metrics.speculation.values[name].get((method, "__base_model__"), 0)

    before = {(name, method): count(name, method) for name in ("drafted_tokens", "accepted_tokens") for method in NAMES}
    await generate(server, max_new_tokens=9, speculative_tokens=4, stop=["h"])
    grown = {key: count(*key) - number for key, number in before.items()}
    assert [grown["drafted_tokens", name] for name in ("lookup", "medusa", "draft")] == [1, 5, 4]
    assert [grown["accepted_tokens", name] for name in ("lookup", "medusa", "draft")] == [1, 1, 1]
