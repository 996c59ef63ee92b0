"""Fields that restrict the output and its end, on every generation route: what the shard gets, and what is answered."""

from typing import Any

import pytest

from lorikeet.proto.grammars import ALL_EXCLUDED, TOO_SLOW
from lorikeet.router.text.tokenizer import bad_word_ids
from tests.router.api.routes.test_openai import CHAT, COMPLETION
from tests.router.scripted_shard import Script
from tests.router.serving import EOS, Serving

pytestmark = pytest.mark.anyio

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
STREAMS = {"/generate": "/generate_stream"}


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    if path == "/generate":
        return {"inputs": "Hi", "parameters": {"max_new_tokens": 20, "details": True, **fields}}
    return {**(COMPLETION if path == "/v1/completions" else CHAT), "max_tokens": 20, **fields}


async def answered(server: Serving, path: str, **fields: Any) -> dict[str, Any]:
    """{text, finish, stop_reason} of an answer; that of the stream must be the same."""
    response = await server.client.post(path, json=body_of(path, fields))
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    answer = shown(path, response.json())
    body = body_of(path, fields) | ({} if path in STREAMS else {"stream": True})
    events = [event for event in await server.events(STREAMS.get(path, path), body) if event != "[DONE]"]
    if path == "/generate":
        assert events[-1]["generated_text"] == answer["text"]
        assert events[-1]["details"]["finish_reason"] == answer["finish"]
    else:
        choices = [event["choices"][0] for event in events]
        texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
        assert "".join(texts) == answer["text"]
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (answer["finish"], answer["stop_reason"])
    return answer


def shown(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    if path == "/generate":
        return {"text": answer["generated_text"], "finish": answer["details"]["finish_reason"]}
    [choice] = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return {"text": text, "finish": choice["finish_reason"], "stop_reason": choice["stop_reason"]}


@pytest.mark.parametrize("path", ROUTES)
async def test_every_field_reaches_the_shard(server: Serving, path: str) -> None:
    server.says("ab")
    fields = {
        "min_tokens": 3,
        "stop_token_ids": [9, 8, 9],
        "allowed_token_ids": [40, 41, 42, 40],
        "bad_words": ["there", "there", "x"],
        "logit_bias": {"5": -100, "7": 1.5},
        "spaces_between_special_tokens": False,
    }
    await answered(server, path, **fields)
    for submit in server.shard.submits:
        sampling = submit.sampling
        assert sorted(submit.stop_ids) == [EOS, 8, 9]
        assert list(sampling.allowed_ids) == [40, 41, 42]
        words = await bad_word_ids(server.service.tokenizer, ["there", "x"])
        assert [tuple(word.token_ids) for word in sampling.bad_words] == list(words)
        assert sampling.min_tokens == 3
        assert sorted(sampling.min_tokens_stop_ids) == [EOS, 8, 9]
        assert list(zip(sampling.bias_ids, sampling.bias_values, strict=True)) == [(5, -100.0), (7, 1.5)]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", ["ignore_eos", "ignore_eos_token"])
async def test_an_ignored_end_of_text_is_masked_up_to_the_minimum(server: Serving, path: str, name: str) -> None:
    server.says("ab", ends=True)
    await answered(server, path, **{name: True})
    submit = server.shard.submits[-1]
    assert list(submit.stop_ids) == [] and list(submit.sampling.min_tokens_stop_ids) == []
    await answered(server, path, **{name: True, "min_new_tokens": 2})
    submit = server.shard.submits[-1]
    assert list(submit.stop_ids) == [] and list(submit.sampling.min_tokens_stop_ids) == [EOS]


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stop_token_is_shown_on_request(server: Serving, path: str) -> None:
    server.says("abcde")
    (stop,) = server.ids("d")
    for fields, text in (
        ({}, "abc"),
        ({"include_stop_str_in_output": True}, "abcd"),
        ({"no_stop_trim": True}, "abcd"),
    ):
        answer = await answered(server, path, stop_token_ids=[stop], **fields)
        assert (answer["text"], answer.get("stop_reason", stop)) == (text, stop)
        assert answer["finish"] == ("stop_sequence" if path == "/generate" else "stop")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stop_string_is_shown_on_request(server: Serving, path: str) -> None:
    server.says("say the end now", hangs=True)
    for include, text in ((True, "say the e"), (False, "say th")):
        answer = await answered(server, path, stop=["e e"], include_stop_str_in_output=include)
        assert (answer["text"], answer.get("stop_reason", "e e")) == (text, "e e")


@pytest.mark.parametrize("path", ROUTES)
async def test_stop_strings_count_from_the_minimum_on(server: Serving, path: str) -> None:
    server.says("a.b.c.d", hangs=True)
    answer = await answered(server, path, stop=["."], min_tokens=4, include_stop_str_in_output=True)
    assert answer["text"] == "a.b.c."


@pytest.mark.parametrize("path", ROUTES)
async def test_special_tokens_are_shown_on_request(server: Serving, path: str) -> None:
    ids = [*server.ids("a"), 0, *server.ids("b"), EOS]
    server.says_ids(ids)
    for fields, text in (
        ({}, "ab"),
        ({"skip_special_tokens": True}, "ab"),
        ({"skip_special_tokens": False}, "a<s>b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<s>b</s>"),
    ):
        answer = await answered(server, path, **fields)
        assert answer["text"] == text
        assert answer.get("stop_reason") is None


NEUTRAL = {
    "min_tokens": 0, "min_new_tokens": None, "stop_token_ids": [], "allowed_token_ids": None, "bad_words": [],
    "ignore_eos": False, "include_stop_str_in_output": None, "no_stop_trim": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "logit_bias": {},
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
async def test_neutral_values_ask_for_nothing(server: Serving, path: str) -> None:
    server.says("ab", ends=True)
    await answered(server, path)
    plain = server.shard.submits[-1]
    await answered(server, path, **NEUTRAL)
    submit = server.shard.submits[-1]
    submit.id, submit.seed = plain.id, plain.seed
    assert submit == plain


REJECTED: list[tuple[str, dict[str, Any]]] = [
    ("min_tokens", {"min_tokens": 21}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_new_tokens", {"min_tokens": 1, "min_new_tokens": 2}),
    ("stop_token_ids", {"stop_token_ids": [300]}),
    ("stop_token_ids", {"stop_token_ids": ["a"]}),
    ("stop_token_ids", {"stop_token_ids": [True]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 1025}),
    ("allowed_token_ids", {"allowed_token_ids": [300]}),
    ("allowed_token_ids", {"allowed_token_ids": [-1]}),
    ("allowed_token_ids", {"allowed_token_ids": [7] * 16385}),
    ("allowed_token_ids", {"allowed_token_ids": 7}),
    ("bad_words", {"bad_words": [" "]}),
    ("bad_words", {"bad_words": "a"}),
    ("bad_words", {"bad_words": ["a"] * 257}),
    ("bad_words", {"bad_words": ["a" * 257]}),
    ("bad_words", {"bad_words": ["ab" * 40]}),
    ("no_stop_trim", {"no_stop_trim": True, "include_stop_str_in_output": False}),
    ("skip_special_tokens", {"skip_special_tokens": 1}),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("param", "fields"), REJECTED)
async def test_rejected_values(server: Serving, path: str, param: str, fields: dict[str, Any]) -> None:
    response = await server.client.post(path, json=body_of(path, fields))
    assert response.status_code == (422 if path == "/generate" else 400), response.text
    assert param in response.text
    if path != "/generate":
        assert response.json()["error"]["param"] == param
    assert not server.shard.submits


async def test_a_mask_that_leaves_no_token_is_rejected(server: Serving) -> None:
    (only,) = server.ids("x")
    fields = {"allowed_token_ids": [only], "bad_words": ["x"]}
    response = await server.client.post("/v1/completions", json=body_of("/v1/completions", fields))
    assert response.status_code == 400 and "allowed_token_ids" in response.text


async def test_only_tokens_that_may_not_end_the_output_yet_are_rejected(server: Serving) -> None:
    fields = {"allowed_token_ids": [EOS, 40], "min_tokens": 2, "stop_token_ids": [40]}
    response = await server.client.post("/v1/completions", json=body_of("/v1/completions", fields))
    assert response.status_code == 400 and "`allowed_token_ids` leaves no token next to `min_tokens`" in response.text


@pytest.mark.parametrize("path", ROUTES)
async def test_masks_that_leave_no_token_later_are_named(server: Serving, path: str) -> None:
    server.shard.answer = lambda submit: Script([40], error=ALL_EXCLUDED)
    response = await server.client.post(path, json=body_of(path, {"allowed_token_ids": [40], "bad_words": ["xx"]}))
    assert response.status_code == (422 if path == "/generate" else 400), response.text
    assert "`allowed_token_ids` and `bad_words` exclude every token after 1 tokens" in response.text


@pytest.mark.parametrize("path", ROUTES)
async def test_masks_need_shards_that_know_them(server: Serving, path: str) -> None:
    info = server.dispatcher.info
    assert info is not None
    server.says("ab")
    info.token_masks, info.version = False, "0.1.9"
    try:
        for field, value in (("min_tokens", 2), ("bad_words", ["a"]), ("allowed_token_ids", [5])):
            response = await server.client.post(path, json=body_of(path, {field: value}))
            assert response.status_code == 422 and field in response.text and "0.1.9" in response.text
        await answered(server, path, stop_token_ids=[5])
    finally:
        info.token_masks = True


async def test_stop_sequences_are_more_stop_strings(server: Serving) -> None:
    server.says("a.b,c", hangs=True)
    for fields in ({"stop_sequences": [","]}, {"stop": ["zz"], "stop_sequences": [","]}):
        assert (await answered(server, "/generate", **fields))["text"] == "a.b,"


async def test_max_completion_tokens_of_completions(server: Serving) -> None:
    server.says("abcdef")
    response = await server.client.post("/v1/completions", json={**COMPLETION, "max_completion_tokens": 3})
    assert response.json()["choices"][0]["text"] == "abc"
    both = {**COMPLETION, "max_completion_tokens": 3, "max_tokens": 4}
    assert (await server.client.post("/v1/completions", json=both)).status_code == 400


async def test_top_tokens_of_tgi(server: Serving) -> None:
    server.says("ab", logprobs=[-0.5, -0.25])
    whole = (await server.client.post("/generate", json=body_of("/generate", {"top_n_tokens": 2}))).json()["details"]
    first = whole["top_tokens"][0]
    assert [entry["id"] for entry in first] == [whole["tokens"][0]["id"], whole["tokens"][0]["id"] + 1]
    assert list(first[0]) == ["id", "text", "logprob", "special"] and first[0]["logprob"] == -0.5
    assert len(whole["top_tokens"]) == 2 and "alternative_tokens" not in whole["tokens"][0]
    fields = {"top_n_tokens": 1, "return_k_alternatives": 3}
    events = await server.events("/generate_stream", body_of("/generate", fields))
    assert [len(event["top_tokens"]) for event in events] == [1, 1]
    assert [len(event["token"]["alternative_tokens"]) for event in events] == [3, 3]
    assert [list(event) for event in events] == [["token", "top_tokens", "generated_text", "details"]] * 2
    response = await server.client.post("/generate", json=body_of("/generate", {"top_n_tokens": 257}))
    assert response.status_code == 422 and "top_n_tokens" in response.text


@pytest.mark.parametrize("path", ROUTES)
async def test_a_grammar_that_takes_too_long_to_match_is_named(server: Serving, path: str) -> None:
    server.shard.answer = lambda submit: Script([40], error=TOO_SLOW)
    response = await server.client.post(path, json=body_of(path, {}))
    assert response.status_code == (422 if path == "/generate" else 400), response.text
    assert "after 1 tokens, the grammar takes too long to match" in response.text


@pytest.mark.parametrize("path", ROUTES)
async def test_shards_know_a_caller_by_an_opaque_id(server: Serving, path: str) -> None:
    server.says("ab")
    for _ in range(2):
        await answered(server, path)
    (caller,) = {submit.caller for submit in server.shard.submits}
    assert len(caller) == 16 and "127.0.0.1" not in caller
    assert {submit.share for submit in server.shard.submits} == {1.0}
