"""vLLM's fields of OpenAI's routes: the tokens of the prompt, and token ids and log probabilities in answers."""

from typing import Any

import pytest

from tests.router.api.routes.test_openai import BOTH, CHAT, COMPLETION, post
from tests.router.serving import EOS, Serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_a_prompt_is_truncated(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("a")
    await post(server, path, body)
    whole = list(server.shard.submits[-1].prompt_ids)
    for fields, kept in (
        ({"truncate_prompt_tokens": 1}, whole[-1:]),
        ({"truncate_prompt_tokens": 1, "truncation_side": "left"}, whole[-1:]),
        ({"truncate_prompt_tokens": 1, "truncation_side": "right"}, whole[:1]),
        ({"truncate_prompt_tokens": 1000}, whole),
        ({"truncate_prompt_tokens": -1}, whole),
    ):
        answer = await post(server, path, {**body, **fields})
        assert list(server.shard.submits[-1].prompt_ids) == kept
        assert answer["usage"]["prompt_tokens"] == len(kept)


async def test_minus_one_keeps_what_a_prompt_may_have(server: Serving) -> None:
    server.says("a")
    body = {**COMPLETION, "prompt": [40] * 2060 + [41], "max_tokens": 1}
    assert (await server.client.post("/v1/completions", json=body)).status_code == 400
    await post(server, "/v1/completions", {**body, "truncate_prompt_tokens": -1})
    assert list(server.shard.submits[-1].prompt_ids) == [40] * 2046 + [41]


async def test_a_long_text_is_truncated_by_its_end(server: Serving) -> None:
    """Without its other end being tokenized; for its beginning it would have to be."""
    server.says("a")
    body = {**COMPLETION, "prompt": "x" * 200_000 + " the end", "truncate_prompt_tokens": 5}
    assert (await server.client.post("/v1/completions", json={**body, "truncation_side": "right"})).status_code == 400
    await post(server, "/v1/completions", body)
    assert list(server.shard.submits[-1].prompt_ids) == server.ids("x the end")[-5:]
    body = {**CHAT, "messages": [{"role": "user", "content": "x" * 200_000}], "truncate_prompt_tokens": 5}
    await post(server, "/v1/chat/completions", body)
    assert list(server.shard.submits[-1].prompt_ids) == server.ids("[assistant]")[-5:]


async def test_a_truncated_prompt_is_echoed_truncated(server: Serving) -> None:
    server.says("!")
    body = {**COMPLETION, "prompt": "Hello", "echo": True, "truncate_prompt_tokens": 2}
    assert (await post(server, "/v1/completions", body))["choices"][0]["text"] == "lo!"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 2048}),
        ("truncation_side", {"truncation_side": "middle"}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ],
)
@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_rejected_values(
    server: Serving, path: str, body: dict[str, Any], param: str, fields: dict[str, Any]
) -> None:
    response = await server.client.post(path, json={**body, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_token_ids_are_returned(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("ab", ends=True)
    ids = [*server.ids("ab"), EOS]
    answer = await post(server, path, {**body, "return_token_ids": True})
    prompt_ids = list(server.shard.submits[-1].prompt_ids)
    [choice] = answer["choices"]
    assert choice["token_ids"] == ids
    assert (answer if path.startswith("/v1/chat") else choice)["prompt_token_ids"] == prompt_ids
    *events, _ = await server.events(path, {**body, "return_token_ids": True, "stream": True})
    choices = [event["choices"][0] for event in events]
    assert [token for entry in choices for token in entry.get("token_ids", [])] == ids
    holders = events if path.startswith("/v1/chat") else choices
    assert holders[0]["prompt_token_ids"] == prompt_ids
    assert all("prompt_token_ids" not in holder for holder in holders[1:])
    assert "token_ids" not in (await post(server, path, body))["choices"][0]


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_details_list_tokens_as_generate_does(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("ab", ends=True)
    generated = await post(server, "/generate", {"inputs": "Hi", "parameters": {"details": True}})
    listed = generated["details"]["tokens"]
    logprobs = {"logprobs": True, "top_logprobs": 2} if path.startswith("/v1/chat") else {"logprobs": 2}
    body = {**body, "details": True}
    assert (await post(server, path, body))["choices"][0]["tokens"] == listed
    *events, _ = await server.events(path, {**body, "stream": True})
    assert [token for event in events for token in event["choices"][0].get("tokens", [])] == listed
    [first, *_] = (await post(server, path, {**body, **logprobs}))["choices"][0]["tokens"]
    assert [alternative["id"] for alternative in first["alternative_tokens"]] == [first["id"], first["id"] + 1]
    assert "tokens" not in (await post(server, path, {**body, "details": False}))["choices"][0]


async def test_tokens_are_written_as_ids(server: Serving) -> None:
    server.says("ab", logprobs=[-0.5, -0.25])
    ids = server.ids("ab")
    body = {**COMPLETION, "logprobs": 2, "echo": True, "return_tokens_as_token_ids": True}
    logprobs = (await post(server, "/v1/completions", body))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in [*server.ids("Hi"), *ids]]
    assert logprobs["top_logprobs"][-1] == {f"token_id:{ids[1]}": -0.25, f"token_id:{ids[1] + 1}": -1.25}
    body = {**CHAT, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    content = (await post(server, "/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in ids]
    assert content[0]["top_logprobs"][0]["token"] == f"token_id:{ids[0]}"


async def test_named_tokens_are_listed_in_place_of_the_likeliest(server: Serving) -> None:
    server.says("ab")
    named = [9, 5]
    body = {**CHAT, "logprobs": True, "top_logprobs": 4, "logprob_token_ids": named, "return_tokens_as_token_ids": True}
    content = (await post(server, "/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert [(alternative["token"], alternative["logprob"]) for alternative in entry["top_logprobs"]] == [
            ("token_id:5", -5.0),
            ("token_id:9", -9.0),
        ]
    body = {**COMPLETION, "logprobs": 0, "logprob_token_ids": named, "return_tokens_as_token_ids": True}
    logprobs = (await post(server, "/v1/completions", body))["choices"][0]["logprobs"]
    ids = server.ids("ab")
    assert logprobs["top_logprobs"][0] == {f"token_id:{ids[0]}": logprobs["token_logprobs"][0],
                                           "token_id:5": -5.0, "token_id:9": -9.0}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprob_token_ids": [1]}, "needs `logprobs`"),
        ({"logprobs": True, "logprob_token_ids": [300]}, "not below 300"),
        ({"logprobs": True, "logprob_token_ids": ["a"]}, "list of token ids"),
        ({"logprobs": True, "logprob_token_ids": list(range(257))}, "up to 256"),
    ],
)
async def test_named_tokens_that_are_no_tokens(server: Serving, fields: dict[str, Any], words: str) -> None:
    response = await server.client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprob_token_ids"
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_log_probabilities_of_the_prompt(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("ab")
    answer = await post(server, path, {**body, "prompt_logprobs": 2})
    ids = list(server.shard.submits[-1].prompt_ids)
    logprobs = (answer if path.startswith("/v1/chat") else answer["choices"][0])["prompt_logprobs"]
    text = server.service.tokenizer.token_text
    assert len(logprobs) == len(ids) and logprobs[0] is None
    assert logprobs[1] == {
        str(ids[1]): {"logprob": -0.5, "rank": 1, "decoded_token": text(ids[1])},
        str(ids[1] + 1): {"logprob": -1.5, "rank": 2, "decoded_token": text(ids[1] + 1)},
    }
    answer = await post(server, path, {**body, "prompt_logprobs": 0})
    logprobs = (answer if path.startswith("/v1/chat") else answer["choices"][0])["prompt_logprobs"]
    assert [list(entry) for entry in logprobs[1:]] == [[str(token)] for token in ids[1:]]
    assert [entry[str(token)]["rank"] for entry, token in zip(logprobs[1:], ids[1:], strict=True)] == [1] * (
        len(ids) - 1
    )


async def test_echoed_log_probabilities_keep_their_own_number(server: Serving) -> None:
    server.says("ab")
    body = {**COMPLETION, "prompt": "abc", "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    [choice] = (await post(server, "/v1/completions", body))["choices"]
    assert [len(entry) for entry in choice["logprobs"]["top_logprobs"][1:3]] == [1, 1]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3, 3]
