"""What OpenAI's answers say about the request: usage in every event, metadata, tiers, speculation, and `suffix`."""

from pathlib import Path
from typing import Any

import pytest

from lorikeet.router.api.routes.information import ALTERNATIVES
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio
CHAT: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": "", "prompt": "Hi", "max_tokens": 4}
BOTH = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completion"]
)
FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@BOTH
async def test_metadata_and_tier_are_in_answers_and_events(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("abcd")
    asked = {**body, "metadata": {"run": "7"}, "service_tier": "auto"}
    answer = (await server.client.post(path, json=asked)).json()
    assert (answer["metadata"], answer["service_tier"]) == ({"run": "7"}, "default")
    for event in (await server.events(path, {**asked, "stream": True}))[:-1]:
        assert (event["metadata"], event["service_tier"]) == ({"run": "7"}, "default")
    answer = (await server.client.post(path, json=body)).json()
    assert not answer.keys() & {"metadata", "service_tier", "metrics"}


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("metadata", {str(number): "" for number in range(17)}, 400),
        ("metadata", {"a" * 65: ""}, 400),
        ("metadata", {"a": "b" * 513}, 400),
        ("metadata", {"a": 3}, 400),
        ("metadata", "a", 400),
        ("service_tier", "free", 400),
        ("stream_options", {"include_usage": True}, 400),
    ],
)
async def test_invalid_values_are_named(server: Serving, field: str, value: Any, status: int) -> None:
    response = await server.client.post("/v1/completions", json={**COMPLETION, field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (status, field)


@BOTH
async def test_usage_is_in_every_event(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("abcd")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await server.events(path, {**body, "stream": True, "stream_options": options}))[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 4
    assert all(event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + count
               for event, count in zip(events, counts, strict=True))  # fmt: skip
    assert events[-1]["choices"] == []
    refused = {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert (await server.client.post(path, json=refused)).status_code == 400


@BOTH
async def test_draft_tokens_are_reported_as_in_vllm(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("abcdef", per_step=3, num_rejected=1)
    asked = {**body, "max_tokens": 6, "speculative_tokens": 3, "speculative_method": "lookup"}
    expected = {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 2 / 3,
        "acceptance_histogram": [0, 0, 2, 0],
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 6,
        "num_spec_steps": 2,
        "num_spec_tokens": 3,
        "per_step_accepted": None,
        "per_step_drafted": None,
    }
    answer = (await server.client.post(path, json=asked)).json()
    assert answer["metrics"] == {"speculative_decoding": expected}
    events = await server.events(path, {**asked, "stream": True, "stream_options": {"include_usage": True}})
    assert events[-2]["metrics"] == {"speculative_decoding": expected}
    answer = (await server.client.post(path, json={**asked, "n": 2})).json()
    assert "metrics" not in answer


async def test_a_suffix_follows_the_gap(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, special_tokens=FIM) as server:
        server.says("x")
        answer = await server.client.post("/v1/completions", json={**COMPLETION, "prompt": "a", "suffix": "b"})
        assert answer.json()["choices"][0]["text"] == "x"
        assert list(server.shard.submits[-1].prompt_ids) == server.ids("<fim_prefix>a<fim_suffix>b<fim_middle>")
        for more in ({"echo": True}, {"truncate_prompt_tokens": 3}, {"prompt": [5]}):
            response = await server.client.post("/v1/completions", json={**COMPLETION, "suffix": "b", **more})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")


async def test_a_suffix_needs_tokens(server: Serving) -> None:
    server.says("x")
    response = await server.client.post("/v1/completions", json={**COMPLETION, "suffix": "b"})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "unsupported_parameter")
    assert "fill-in-the-middle" in response.json()["error"]["message"]
    assert (await server.client.post("/v1/completions", json={**COMPLETION, "suffix": ""})).status_code == 200


async def test_routes_that_do_not_exist_name_an_alternative(server: Serving) -> None:
    for prefix, alternative in ALTERNATIVES.items():
        for path in (prefix, f"{prefix}/more/of/it"):
            error = (response := await server.client.post(path, json={})).json()["error"]
            assert response.status_code == 501
            assert error["message"] == f"`{prefix}` is not supported by this server: {alternative}"
    for path in ("/v1/files", "/v1/files/a%0Ab/content%0A"):
        assert (await server.client.get(path)).status_code == 501
    assert (await server.client.get("/v1/filesystem")).status_code == 404


def test_the_documentation_lists_what_is_not_supported() -> None:
    page = (Path(__file__).parents[4] / "docs" / "routes.md").read_text()
    assert [prefix for prefix in ALTERNATIVES if f"`{prefix}`" not in page] == []
