"""LoRAX's generation routes: shapes, order of keys, headers, framing, and what each parameter does."""

import json
import math
import threading
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.router.api.routes import native
from lorikeet.router.requests.request import Alternatives
from lorikeet.router.schemas.native import GenerateParameters
from tests.router.serving import MODEL_ID, Serving

pytestmark = pytest.mark.anyio

TIMES = (
    "x-compute-time",
    "x-total-time",
    "x-validation-time",
    "x-queue-time",
    "x-inference-time",
    "x-time-per-token",
    "x-time-to-first-token",
    "x-time-per-output-token",
)


async def generate(server: Serving, inputs: str = "Hi", path: str = "/generate", **parameters: Any) -> Any:
    response = await server.client.post(path, json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    return response.json()


async def test_compat_answers_a_list_of_one_byte_for_byte(server: Serving) -> None:
    server.says(" there!", per_step=2, logprobs=[-0.4, -0.1])
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "details": True}, "stream": False}
    for path in ("/", "/invocations"):
        response = await server.client.post(path, json=body)
        assert response.text == (
            '[{"generated_text":" there!","details":{"finish_reason":"length","prompt_tokens":2,"generated_tokens":2,'
            '"skipped_tokens":1,"seed":null,"prefill":[],"tokens":['
            '{"id":262,"text":" there","logprob":-0.4,"special":false,"skipped":false,"source":"lookup"},'
            '{"id":2,"text":"!","logprob":-0.1,"special":false,"skipped":true,"source":"bonus"}]}}]'
        )


async def test_generate_answers_an_object_and_details_only_when_asked(server: Serving) -> None:
    server.says(" there!")
    assert await generate(server, max_new_tokens=2) == {"generated_text": " there!"}
    assert "details" in await generate(server, max_new_tokens=2, decoder_input_details=True)


async def test_headers_of_an_answer(server: Serving) -> None:
    server.says(" there!", per_step=2)
    response = await server.client.post("/generate", json={"inputs": "Hi", "parameters": {"max_new_tokens": 2}})
    headers = response.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-characters"] == "2"
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("2", "2")
    assert (headers["x-skipped-tokens"], headers["x-total-tokens"]) == ("1", "4")
    assert headers["x-model-id"] == MODEL_ID
    assert all(headers[name].isdigit() for name in TIMES)
    assert "x-adapter-id" not in headers and "x-ignored-fields" not in headers


async def test_stream_byte_for_byte(server: Serving) -> None:
    server.says(" there!", logprobs=[-0.4, -0.1])
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "details": True}}
    response = await server.client.post("/generate_stream", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-compute-type"] == "gpu+optimized"
    assert response.headers["x-compute-characters"] == "2"
    assert response.headers["x-model-id"] == MODEL_ID
    assert response.text == (
        'data: {"token":{"id":262,"text":" there","logprob":-0.4,"special":false,"skipped":false,"source":"target"},'
        '"generated_text":null,"details":null}\n\n'
        'data: {"token":{"id":2,"text":"!","logprob":-0.1,"special":false,"skipped":false,"source":"target"},'
        '"generated_text":" there!","details":{"finish_reason":"length","prompt_tokens":2,"generated_tokens":2,'
        '"seed":null}}\n\n'
    )


async def test_compat_streams_on_request(server: Serving) -> None:
    server.says(" there!")
    for path in ("/", "/invocations"):
        events = await server.events(path, {"inputs": "Hi", "parameters": {"max_new_tokens": 2}, "stream": True})
        assert [event["token"]["text"] for event in events] == [" there", "!"]
        assert [event["generated_text"] for event in events] == [None, " there!"]
        assert [event["details"] for event in events] == [None, None]


async def test_several_tokens_of_one_step_are_several_events(server: Serving) -> None:
    server.says("abcdef", per_step=3)
    events = await server.events("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 6}})
    assert [event["token"]["skipped"] for event in events] == [False, True, True, False, True, True]
    assert events[-1]["generated_text"] == "abcdef"


async def test_explicit_nulls_are_absences(server: Serving) -> None:
    server.says("abc")
    nulls = dict.fromkeys([*GenerateParameters.applied, "response_format"])
    response = await server.client.post("/", json={"inputs": "Hi", "parameters": nulls, "stream": None})
    assert response.json() == [{"generated_text": "abc"}]
    assert "x-ignored-fields" not in response.headers
    assert (await server.client.post("/", json={"inputs": "Hi", "parameters": None})).status_code == 200


async def test_output_is_bounded_by_what_the_prompt_leaves(server: Serving) -> None:
    await generate(server, "abcd")
    assert server.shard.submits[-1].max_new_tokens == 2048 - 4


@pytest.mark.parametrize(
    ("parameters", "do_sample"),
    [
        ({}, False),
        ({"temperature": 0}, False),
        ({"temperature": 1}, False),
        ({"temperature": 0.7}, True),
        ({"do_sample": True}, True),
        ({"do_sample": True, "temperature": 0}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"top_p": 1.0}, False),
        ({"typical_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"repetition_penalty": 1.2}, False),
    ],
)
async def test_fields_that_enable_sampling(server: Serving, parameters: dict[str, Any], do_sample: bool) -> None:
    server.says("abc")
    answer = await generate(server, details=True, **parameters)
    sampling = server.shard.submits[-1].sampling
    assert sampling.do_sample is do_sample
    assert (answer["details"]["seed"] is not None) is do_sample


async def test_every_sampling_field_reaches_the_shard(server: Serving) -> None:
    server.says("abc")
    await generate(
        server,
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.25,
        typical_p=0.875,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        watermark=True,
        seed=2**64 - 1,
        ignore_eos_token=True,
    )
    submit = server.shard.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.75, 0.25)
    assert (sampling.typical_p, sampling.repetition_penalty, sampling.watermark) == (0.875, 1.5, True)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 0.25)
    assert submit.seed == 2**64 - 1
    assert list(submit.stop_ids) == []


async def test_a_seed_is_shown_and_a_missing_one_is_generated(server: Serving) -> None:
    server.says("abc")
    sampled = await generate(server, details=True, do_sample=True, seed=17)
    made = [await generate(server, details=True, do_sample=True) for _ in range(2)]
    assert sampled["details"]["seed"] == 17
    seeds = [answer["details"]["seed"] for answer in made]
    assert seeds == [submit.seed for submit in server.shard.submits[1:]]
    assert seeds[0] != seeds[1]


async def test_end_of_text_is_a_token_without_text(server: Serving) -> None:
    server.says("abc", ends=True)
    answer = await generate(server, details=True)
    assert answer["generated_text"] == "abc"
    assert answer["details"]["finish_reason"] == "eos_token"
    assert answer["details"]["generated_tokens"] == len(answer["details"]["tokens"]) == 4
    last = answer["details"]["tokens"][-1]
    assert (last["text"], last["special"]) == ("</s>", True)


async def test_a_stop_string_stays_in_the_text_and_aborts_in_the_shard(server: Serving) -> None:
    server.says("say the end now", hangs=True)
    answer = await generate(server, details=True, stop=["e e"])
    assert answer["generated_text"] == "say the e"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == "say the e"
    await server.shard.until(lambda: server.shard.abort_ids == [server.shard.submits[-1].id])


async def test_stop_inside_one_token_is_found(server: Serving) -> None:
    server.says("a there b", hangs=True)
    answer = await generate(server, details=True, stop=["her"])
    assert answer["generated_text"] == "a ther"
    assert answer["details"]["finish_reason"] == "stop_sequence"


async def test_characters_of_several_tokens_are_whole(server: Serving) -> None:
    server.says("aé€🦜z")
    events = await server.events("/generate_stream", {"inputs": "Hi"})
    texts = [event["token"]["text"] for event in events]
    assert "".join(texts) == "aé€🦜z" == events[-1]["generated_text"]
    assert "\ufffd" not in "".join(texts)
    assert len(texts) == len("aé€🦜z".encode())


async def test_full_text_has_the_prompt_first(server: Serving) -> None:
    server.says("abc")
    assert (await generate(server, return_full_text=True))["generated_text"] == "Hiabc"
    events = await server.events("/generate_stream", {"inputs": "Hi", "parameters": {"return_full_text": True}})
    assert events[-1]["generated_text"] == "Hiabc"


async def test_truncate_keeps_the_end_of_the_prompt(server: Serving) -> None:
    server.says("x")
    response = await server.client.post(
        "/generate", json={"inputs": "abc" * 1000 + "XYZ", "parameters": {"truncate": 3, "max_new_tokens": 1}}
    )
    assert response.status_code == 200
    assert list(server.shard.submits[-1].prompt_ids) == server.ids("XYZ")
    assert response.headers["x-prompt-tokens"] == "3"


async def test_prompt_log_probabilities(server: Serving) -> None:
    server.says("x")
    answer = await generate(server, "Hi there", decoder_input_details=True)
    assert answer["details"]["prefill"] == [
        {"id": token, "text": text, "logprob": logprob}
        for token, text, logprob in zip(server.ids("Hi there"), ["H", "i", " there"], [None, -0.5, -0.5], strict=True)
    ]
    assert (await generate(server, details=True))["details"]["prefill"] == []


async def test_large_details_are_put_together_off_the_event_loop(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    build = native.NativeRoutes._sequence

    def recorded(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return build(*arguments)

    monkeypatch.setattr(native.NativeRoutes, "_sequence", recorded)
    server.says("a" * 100)
    few = await generate(server, details=True, return_k_alternatives=2)
    many = await generate(server, details=True, return_k_alternatives=200)
    assert len(few["details"]["tokens"][0]["alternative_tokens"]) == 2
    assert len(many["details"]["tokens"][99]["alternative_tokens"]) == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


class Spelled:
    """A tokenizer whose texts a format could misread."""

    texts = ("%", "%s%%", '"logprob":-inf}', "\\é\n", "", "\ufffd")

    class vocabulary:
        @staticmethod
        def text(token_id: int) -> str:
            return Spelled.texts[token_id]

    def token_text(self, token_id: int) -> str:
        return self.texts[token_id]


@given(
    st.lists(st.tuples(st.integers(0, len(Spelled.texts) - 1), st.floats(max_value=0.0, allow_nan=False, width=32))),
    st.integers(0, 8),
)
def test_alternatives_are_written_as_from_objects(entries: list[tuple[int, float]], count: int) -> None:
    tokenizer: Any = Spelled()
    alternatives = Alternatives.of([number for number, _ in entries], [value for _, value in entries], tokenizer)
    written = json.loads(orjson.dumps(native._alternatives_json(alternatives.first(count))))
    assert written == [
        {"id": number, "text": Spelled.texts[number], "logprob": None if value == -math.inf else round(value, 7)}
        for number, value in entries[:count]
    ]


async def test_alternative_tokens(server: Serving) -> None:
    server.says("ab", logprobs=[-0.25, float("-inf")])
    answer = await generate(server, details=True, return_k_alternatives=2)
    first, second = answer["details"]["tokens"]
    assert list(first) == ["id", "text", "logprob", "special", "alternative_tokens", "skipped", "source"]
    [a, b] = server.ids("ab")
    assert first["alternative_tokens"] == [
        {"id": a, "text": "a", "logprob": -0.25},
        {"id": b, "text": "b", "logprob": -1.25},
    ]
    assert second["logprob"] is None
    events = await server.events("/generate_stream", {"inputs": "Hi", "parameters": {"return_k_alternatives": 2}})
    assert events[0]["token"] == first


async def test_best_of_returns_the_likeliest_and_shows_the_others(server: Serving) -> None:
    server.says("low", "high")
    chances = iter([[-2.0, -2.0, -2.0], [-0.1, -0.2, -0.3, -0.4]])
    answer_texts = server.shard.answer

    def answer(submit: Any) -> Any:
        script = answer_texts(submit)
        script.logprobs = next(chances)
        return script

    server.shard.answer = answer
    whole = await generate(server, best_of=2, do_sample=True, details=True)
    assert whole["generated_text"] == "high"
    [loser] = whole["details"]["best_of_sequences"]
    assert list(loser) == ["generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert (loser["generated_text"], loser["generated_tokens"]) == ("low", 3)
    first, second = server.shard.submits
    assert first.seed != second.seed
    assert {whole["details"]["seed"], loser["seed"]} == {first.seed, second.seed}


async def test_best_of_one_and_null_have_no_others(server: Serving) -> None:
    server.says("abc")
    assert "best_of_sequences" not in (await generate(server, best_of=1, details=True))["details"]


async def test_unknown_fields_are_ignored_and_named(server: Serving) -> None:
    server.says("abc")
    body = {"inputs": "Hi", "parameters": {"rid": "x", "apply_chat_template": True}, "ünknown, field": 1}
    for path in ("/generate", "/generate_stream"):
        response = await server.client.post(path, json=body)
        assert response.status_code == 200
        names = response.headers["x-ignored-fields"].split(", ")
        assert names == ["?nknown? field", "parameters.rid", "parameters.apply_chat_template"]


@pytest.mark.parametrize("name", [None, "", "__base_model__", MODEL_ID])
async def test_names_of_the_base_model(server: Serving, name: str | None) -> None:
    server.says("abc")
    response = await server.client.post("/generate", json={"inputs": "Hi", "parameters": {"adapter_id": name}})
    assert response.status_code == 200
    assert "x-adapter-id" not in response.headers


async def test_a_failure_in_the_shard(server: Serving) -> None:
    server.says("ab", error="out of pages")
    expected = {"error": "Request failed during generation: out of pages", "error_type": "generation"}
    response = await server.client.post("/generate", json={"inputs": "Hi"})
    assert (response.status_code, response.json()) == (424, expected)
    events = await server.events("/generate_stream", {"inputs": "Hi"})
    assert [event["token"]["text"] for event in events[:-1]] == ["a", "b"]
    assert events[-1] == expected


async def test_nul_bytes_are_text(server: Serving) -> None:
    server.says("a\0b")
    answer = await generate(server, "\0")
    assert answer["generated_text"] == "a\0b"


async def test_a_client_that_sends_byte_by_byte(server: Serving) -> None:
    server.says("abc")
    body = json.dumps({"inputs": "Hi"}).encode()

    async def slowly() -> Any:
        for index in range(len(body)):
            yield body[index : index + 1]

    headers = {"content-type": "application/json"}
    response: httpx.Response = await server.client.post("/generate", content=slowly(), headers=headers)
    assert response.json() == {"generated_text": "abc"}
