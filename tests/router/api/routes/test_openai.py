"""OpenAI's routes over plain HTTP: shapes, semantics and errors."""

import threading
import time
from typing import Any

import pytest

from lorikeet.router.api import answer_parts
from lorikeet.router.api.routes import openai
from lorikeet.router.api.routes.completions import CompletionsRoute
from lorikeet.router.requests.request import PromptScores
from tests.router.scripted_shard import Script
from tests.router.serving import EOS, MODEL_ID, Serving

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL_ID, "prompt": "Hi"}
BOTH = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


EOS_TEXT = "<eos>"


def token_ids(server: Serving, part: str | int) -> list[int]:
    """Tokens of a text, of one byte, or the end of the text."""
    vocabulary = server.service.tokenizer.vocabulary
    if part == EOS_TEXT:
        return [EOS]
    if isinstance(part, str):
        return server.ids(part)
    return [token_id for token_id in range(vocabulary.size) if vocabulary.piece(token_id) == bytes([part])][:1]


async def post(server: Serving, path: str, body: dict[str, Any]) -> Any:
    response = await server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_completion(server: Serving) -> None:
    server.says(" there!", ends=True)
    answer = await post(server, "/v1/completions", COMPLETION)
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert abs(answer["created"] - time.time()) < 60
    assert answer["model"] == MODEL_ID
    assert answer["choices"] == [
        {"index": 0, "text": " there!", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert list(answer["usage"])[:3] == ["prompt_tokens", "total_tokens", "completion_tokens"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 3)
    assert answer["usage"]["total_tokens"] == 5
    assert answer["system_fingerprint"]


async def test_chat(server: Serving) -> None:
    server.says(" there!", ends=True)
    answer = await post(server, "/v1/chat/completions", CHAT)
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": " there!", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert list(server.shard.submits[0].prompt_ids) == server.ids("[user]Hi[assistant]")


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_lorax_headers(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("ab")
    response = await server.client.post(path, json=body)
    assert response.headers["x-generated-tokens"] == "2"
    assert response.headers["x-model-id"] == MODEL_ID
    assert response.headers["x-compute-type"] == "gpu+optimized"


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_sampling_is_the_default_and_zero_is_greedy(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("ab")
    expected = [({}, True, 1.0), ({"temperature": 1}, True, 1.0), ({"temperature": 0}, False, 1.0)]
    for fields, do_sample, temperature in expected:
        await post(server, path, {**body, **fields})
        sampling = server.shard.submits[-1].sampling
        assert (sampling.do_sample, sampling.temperature) == (do_sample, temperature)


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_every_field_reaches_the_shard(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("ab")
    fields = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.25,
        "logit_bias": {"5": -100, "7": 1.5},
        "seed": -1,
        "max_tokens": 9,
        "ignore_eos_token": True,
        "user": "me",
    }
    response = await server.client.post(path, json={**body, **fields})
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers
    submit = server.shard.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 7, 0.25)
    assert (sampling.repetition_penalty, sampling.frequency_penalty) == (1.5, -0.5)
    assert sampling.presence_penalty == 0.25
    assert list(zip(sampling.bias_ids, sampling.bias_values, strict=True)) == [(5, -100.0), (7, 1.5)]
    assert (submit.seed, submit.max_new_tokens, list(submit.stop_ids)) == (2**64 - 1, 9, [])


async def test_lengths_by_default(server: Serving) -> None:
    server.says("ab")
    await post(server, "/v1/completions", COMPLETION)
    assert server.shard.submits[-1].max_new_tokens == 16
    await post(server, "/v1/chat/completions", CHAT)
    submit = server.shard.submits[-1]
    assert submit.max_new_tokens == 2048 - len(submit.prompt_ids)
    await post(server, "/v1/chat/completions", {**CHAT, "max_completion_tokens": 3})
    assert server.shard.submits[-1].max_new_tokens == 3


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("stop", ["e e", ["zzz", "e e"]])
async def test_stop_text_is_cut(server: Serving, path: str, body: dict[str, Any], stop: Any) -> None:
    server.says("say the end now", hangs=True)
    [choice] = (await post(server, path, {**body, "stop": stop}))["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert (text, choice["finish_reason"]) == ("say th", "stop")


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_choices_differ_in_seed(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("a", "bb", "ccc")
    answer = await post(server, path, {**body, "n": 3, "seed": 5})
    texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["a", "bb", "ccc"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [submit.seed for submit in server.shard.submits] == [5, 6, 7]
    num_prompt = len(server.shard.submits[0].prompt_ids)
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == 6


async def test_best_of_keeps_the_likeliest(server: Serving) -> None:
    server.says("low", "high")
    texts = server.shard.answer
    chances = iter([[-2.0] * 3, [-0.1] * 4])

    def answer(submit: Any) -> Any:
        script = texts(submit)
        script.logprobs = next(chances)
        return script

    server.shard.answer = answer
    whole = await post(server, "/v1/completions", {**COMPLETION, "best_of": 2})
    assert [choice["text"] for choice in whole["choices"]] == ["high"]
    assert whole["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([41, 42], [[41, 42]]),
        ([[41, 42], [43]], [[41, 42], [43]]),
    ],
)
async def test_forms_of_a_prompt(server: Serving, prompt: Any, expected: list[Any]) -> None:
    server.says("a")
    answer = await post(server, "/v1/completions", {**COMPLETION, "prompt": prompt, "n": 2})
    ids = [server.ids(one) if isinstance(one, str) else one for one in expected]
    assert [list(submit.prompt_ids) for submit in server.shard.submits] == [one for one in ids for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(len(one) for one in ids)


async def test_echo(server: Serving) -> None:
    server.says(" there")
    [choice] = (await post(server, "/v1/completions", {**COMPLETION, "echo": True}))["choices"]
    assert choice["text"] == "Hi there"
    body = {**COMPLETION, "prompt": server.ids("Hé"), "echo": True}
    assert (await post(server, "/v1/completions", body))["choices"][0]["text"] == "Hé there"
    events = await server.events("/v1/completions", {**COMPLETION, "echo": True, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Hi there"


async def test_completion_logprobs(server: Serving) -> None:
    server.says(" there!", ends=True, logprobs=[-0.5, -0.25, -0.125])
    [choice] = (await post(server, "/v1/completions", {**COMPLETION, "logprobs": 2}))["choices"]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert logprobs["tokens"] == [" there", "!"]
    assert logprobs["token_logprobs"] == [-0.5, -0.25]
    assert logprobs["top_logprobs"][1] == {"!": -0.25, '"': -1.25}
    assert logprobs["text_offset"] == [0, 6]
    submit = server.shard.submits[0]
    assert submit.logprobs.mode == submit.logprobs.RAW
    [choice] = (await post(server, "/v1/completions", {**COMPLETION, "logprobs": 0}))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -0.25]
    assert choice["logprobs"]["top_logprobs"] is None


async def test_tokens_without_a_text_of_their_own_are_shown_as_bytes(server: Serving) -> None:
    """`é` is two tokens, each with half a character: both would be the same replacement character."""
    server.says("é", logprobs=[-2.0, -0.5])
    body = {**COMPLETION, "logprobs": 2, "max_tokens": 2}
    [choice] = (await post(server, "/v1/completions", body))["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "é"
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["top_logprobs"] == [
        {"bytes:\\xc3": -2.0, "bytes:\\xc4": -3.0},
        {"bytes:\\xa9": -0.5, "bytes:\\xaa": -1.5},
    ]


async def test_the_likelier_of_two_tokens_with_the_same_text_is_shown(server: Serving) -> None:
    vocabulary = server.service.tokenizer.vocabulary
    route = CompletionsRoute(server.service)
    [a, b] = server.ids("ab")
    vocabulary.texts[b] = "a"
    texts, vocabulary.text = vocabulary.text, lambda token: "a" if token == b else texts(token)  # type: ignore
    try:
        own, top = route._shown(a, -3.0, [(b, "a", -0.5), (a, "a", -3.0)])
        assert (own, top) == ("bytes:\\x61", {"a": -0.5, "bytes:\\x61": -3.0})
    finally:
        vocabulary.text = texts  # type: ignore[method-assign]
        del vocabulary.texts[b]


async def test_a_request_id_is_the_end_of_the_answer_s_id(server: Serving) -> None:
    server.says("ab")
    for path, body in BOTH:
        for headers, expected in (({}, "mine-1"), ({"x-request-id": "proxy"}, "proxy")):
            response = await server.client.post(path, json={**body, "request_id": "mine-1"}, headers=headers)
            assert response.json()["id"].endswith("-mine-1")
            assert response.headers.get_list("x-request-id") == [expected]


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_do_sample_false_is_greedy(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("ab")
    for value, expected in ((False, False), (True, True), (None, True)):
        await post(server, path, {**body, "do_sample": value})
        assert server.shard.submits[-1].sampling.do_sample is expected


async def test_scoring_a_prompt(server: Serving) -> None:
    server.says("x")
    body = {**COMPLETION, "prompt": "Hi there", "echo": True, "max_tokens": 0, "logprobs": 1}
    expected = {
        "tokens": ["H", "i", " there"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"i": -0.5}, {" there": -0.5}],
        "text_offset": [0, 1, 2],
    }
    answer = await post(server, "/v1/completions", body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("Hi there", expected, "length")
    assert answer["usage"]["completion_tokens"] == 0
    events = await server.events("/v1/completions", {**body, "stream": True})
    assert events[0]["choices"] == answer["choices"]


LISTING: dict[str, dict[str, Any]] = {
    "/v1/completions": {**COMPLETION, "prompt": ["Hi there", "Ho"], "echo": True, "logprobs": 2, "prompt_logprobs": 2},
    "/v1/chat/completions": {**CHAT, "logprobs": True, "prompt_logprobs": 2},
    "/generate": {"inputs": "Hi there", "parameters": {"details": True, "decoder_input_details": True}},
}


@pytest.mark.parametrize("path", LISTING)
async def test_what_lists_much_is_written_in_a_thread(
    path: str, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[int]()
    tokens = PromptScores.tokens

    def noted(scores: PromptScores) -> Any:
        threads.add(threading.get_ident())
        return tokens(scores)

    async def answers() -> list[Any]:
        whole = await post(server, path, LISTING[path])
        shown = [whole.get(name) for name in ("choices", "prompt_logprobs", "details")]
        if path == "/v1/completions":
            body = {**COMPLETION, "prompt": "Hi there", "echo": True, "logprobs": 2, "stream": True}
            stream = await server.events(path, body)
            shown += [event["choices"] for event in stream[:-1]]
        return shown

    server.says(" there", ends=True)
    monkeypatch.setattr(PromptScores, "tokens", noted)
    small = await answers()
    assert threads == {threading.get_ident()}
    for module in (answer_parts, openai):
        monkeypatch.setattr(module, "LARGE_ENTRIES", 0)
    threads.clear()
    assert await answers() == small
    assert threads and threading.get_ident() not in threads


async def test_chat_logprobs(server: Serving) -> None:
    server.says("é!", ends=True, logprobs=[-0.5, float("-inf"), -0.125, -0.1])
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    [choice] = (await post(server, "/v1/chat/completions", body))["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [33]]
    assert [entry["logprob"] for entry in content] == [-0.5, -9999.0, -0.125]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert content[2]["token"] == content[2]["top_logprobs"][0]["token"] == "!"
    [choice] = (await post(server, "/v1/chat/completions", {**CHAT, "logprobs": True}))["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], []]


async def test_tokens_that_a_stop_cut_have_no_logprobs(server: Serving) -> None:
    server.says("abcSTOPxyz", hangs=True)
    body = {**COMPLETION, "stop": "STOP", "logprobs": 0, "max_tokens": 50}
    [choice] = (await post(server, "/v1/completions", body))["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == "abc"


def listed(events: list[Any]) -> dict[str, list[Any]]:
    """`logprobs` of a stream's events as one."""
    joined: dict[str, list[Any]] = {}
    for event in events[:-1]:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            if values:
                joined.setdefault(name, []).extend(values)
    return joined


CHARACTERS: dict[str, list[str | int]] = {
    "characters of several tokens": ["é", "F", "日本", "!"],
    "an incomplete character before another": [0xC3, "F", 0xE6, 0x97, "x", 0xF0, 0x9F, "é"],
    "an incomplete character at the end": ["ab", 0xE6, 0x97],
    "an incomplete character before the end of the text": ["ab", 0xE6, 0x97, EOS_TEXT],
    "bytes that begin no character": [0xA9, 0xC3, 0xC3, 0xA9, 0xFF, "z"],
}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("case", CHARACTERS)
async def test_offsets_point_at_the_text_of_their_tokens(case: str, step: int, echo: bool, server: Serving) -> None:
    """Of the prompt's tokens and of the output's, in an answer and in a stream."""
    ids = [token_id for part in CHARACTERS[case] for token_id in token_ids(server, part)]
    server.shard.answer = lambda submit: Script(ids, per_step=step, step_seconds=0.002)
    prompt_ids = server.ids("Hé") + token_ids(server, 0xE6) + server.ids("i日")
    body = {**COMPLETION, "prompt": prompt_ids, "echo": echo, "logprobs": 0, "max_tokens": len(ids)}
    [choice] = (await post(server, "/v1/completions", body))["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    expected_ids = [*(prompt_ids if echo else ()), *(token_id for token_id in ids if echo or token_id != EOS)]
    assert len(logprobs["tokens"]) == len(expected_ids)
    data, start = b"", 0
    shown_ids = [token_id for token_id in expected_ids if token_id != EOS]
    for number, (token_id, offset) in enumerate(zip(shown_ids, logprobs["text_offset"], strict=False), 1):
        piece = server.service.tokenizer.vocabulary.piece(token_id)
        # the character that holds the token's first byte
        before = (data + piece[:1]).decode(errors="replace")
        assert offset == start + len(before) - 1, (text, logprobs)
        data += piece
        if echo and number == len(prompt_ids):
            data, start = b"", len(data.decode(errors="replace"))
    assert text.endswith(data.decode(errors="replace"))
    streamed = await server.events("/v1/completions", {**body, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == text
    assert listed(streamed) == {name: values for name, values in logprobs.items() if values}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("text", ["abcSTOPxyz", "abSTOxSTéSTOPyz", "STOP", "aSTO", "éSTOPé"])
async def test_a_stream_lists_the_tokens_that_an_answer_lists(text: str, step: int, path: str, server: Serving) -> None:
    """Tokens whose text may become a stop string are listed once it is shown."""
    ids = server.ids(text)
    server.shard.answer = lambda submit: Script(ids, per_step=step, step_seconds=0.002)
    fields = (
        {**COMPLETION, "logprobs": 1} if path == "/v1/completions" else {**CHAT, "logprobs": True, "top_logprobs": 1}
    )
    body = {**fields, "stop": "STOP", "max_tokens": len(ids)}
    [choice] = (await post(server, path, body))["choices"]
    streamed = await server.events(path, {**body, "stream": True})
    assert listed(streamed) == {name: values for name, values in choice["logprobs"].items() if values}


async def test_completion_stream(server: Serving) -> None:
    server.says(" there!", ends=True)
    body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = await server.events("/v1/completions", body)
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in [*chunks, last]} == {last["id"]} and last["id"].startswith("cmpl-")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " there!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 3)


async def test_chat_stream(server: Serving) -> None:
    server.says(" there!", ends=True)
    *chunks, done = await server.events("/v1/chat/completions", {**CHAT, "stream": True})
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == " there!"
    assert deltas[-1] == {} and chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_streamed_choices_interleave(server: Serving) -> None:
    server.says("aaaa", "bbbbbb", step_seconds=0.005)
    body = {**CHAT, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    *chunks, last, _ = await server.events("/v1/chat/completions", body)
    texts = ["", ""]
    order = []
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        order.append(choice["index"])
    assert texts == ["aaaa", "bbbbbb"]
    assert order != sorted(order), "both run at the same time"
    assert last["usage"]["completion_tokens"] == 10


async def test_streamed_logprobs(server: Serving) -> None:
    server.says("ab", logprobs=[-0.5, -0.25])
    events = await server.events("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True})
    entries = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [entry["logprob"] for logprobs in entries if logprobs for entry in logprobs["content"]] == [-0.5, -0.25]
    events = await server.events("/v1/completions", {**COMPLETION, "stream": True, "logprobs": 1})
    entries = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [offset for logprobs in entries if logprobs for offset in logprobs["text_offset"]] == [0, 1]


async def test_a_stream_withholds_what_could_become_a_stop(server: Serving) -> None:
    server.says("abSTOxSTOPyz", hangs=True)
    body = {**COMPLETION, "stream": True, "stop": "STOP", "max_tokens": 50}
    *chunks, _ = await server.events("/v1/completions", body)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "abSTOx"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_failed_stream_ends_with_an_error_and_without_done(server: Serving) -> None:
    server.says("ab", error="out of pages")
    for path, body in BOTH:
        events = await server.events(path, {**body, "stream": True})
        assert events[-1]["error"]["message"] == "Request failed during generation: out of pages"
        assert events[-1]["error"]["type"] == "server_error"


async def test_a_failure_in_the_shard(server: Serving) -> None:
    server.says("ab", error="out of pages")
    for path, body in BOTH:
        response = await server.client.post(path, json={**body, "n": 2})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "[system]S[user]U[assistant]"),
        ([{"role": "developer", "content": "S"}], "[system]S[assistant]"),
        ([{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}], "[user]AB"),
        ([{"role": "user", "content": "U"}, {"role": "assistant", "content": None}], "[user]U[assistant][assistant]"),
        ([{"role": "user", "content": "U", "name": "me"}], "[user]U[assistant]"),
    ],
)
async def test_messages(server: Serving, messages: list[Any], prompt: str) -> None:
    server.says("x")
    await post(server, "/v1/chat/completions", {**CHAT, "messages": messages})
    ids = server.ids(prompt)
    assert list(server.shard.submits[-1].prompt_ids)[: len(ids)] == ids


async def test_models(server: Serving) -> None:
    listed = (await server.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL_ID, "model", 2048)
    assert (await server.client.get(f"/v1/models/{MODEL_ID}")).json() == model
    response = await server.client.get("/v1/models/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
