"""`/v1/responses` with OpenAI's client: items in and out, events of streams, tools, reasoning and structured output."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio
ROUTE = "/v1/responses"
TEMPLATE = (
    "{% if tools %}[tools]{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}[assistant]"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "The weather", "parameters": PARAMETERS, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
async def server(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("responses"), chat_template=TEMPLATE) as running:
        yield running


@pytest.fixture
async def client(server: Serving) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as package:
        yield package


def prompt(server: Serving) -> str:
    text: str = server.backend.decode(list(server.shard.submits[-1].prompt_ids), skip_special_tokens=False)
    return text


async def refusal(server: Serving, **fields: Any) -> tuple[int, str, str]:
    response = await server.client.post(ROUTE, json={"model": MODEL_ID, "input": "Hi", **fields})
    assert response.status_code >= 400, response.text
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


async def test_a_text(server: Serving, client: openai.AsyncOpenAI) -> None:
    server.says(" there!", ends=True)
    answer = await client.responses.create(
        model=MODEL_ID, input="Hi", instructions="Be short.", metadata={"a": "b"}, temperature=0.5, store=True
    )
    assert prompt(server) == "[system]Be short.[user]Hi[assistant]"
    assert answer.output_text == " there!"
    assert (answer.status, answer.store if hasattr(answer, "store") else None) == ("completed", False)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be short.", {"a": "b"}, 0.5)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens == 3 and answer.usage.input_tokens_details.cached_tokens == 0
    assert (answer.previous_response_id, answer.background, answer.error) == (None, False, None)


async def test_items_of_a_conversation(server: Serving) -> None:
    server.says("x", ends=True)
    items = [
        {"role": "developer", "content": "S"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]  # fmt: skip
    response = await server.client.post(ROUTE, json={"model": MODEL_ID, "input": items})
    assert response.status_code == 200, response.text
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert prompt(server) == f"[system]S[user]a[assistant]<think>T</think>b{call}[tool]rain[assistant]"


async def test_a_limit_makes_the_answer_incomplete(server: Serving, client: openai.AsyncOpenAI) -> None:
    server.says("abcdef")
    answer = await client.responses.create(model=MODEL_ID, input="Hi", max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "abc")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    stream = await client.responses.create(model=MODEL_ID, input="Hi", max_output_tokens=3, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_a_call_and_its_result(server: Serving, client: openai.AsyncOpenAI) -> None:
    server.says(f"Let me look.\n{CALL}", ends=True)
    answer = await client.responses.create(model=MODEL_ID, input="Paris?", tools=[TOOL])  # type: ignore[list-item]
    assert prompt(server) == "[tools]weather[user]Paris?[assistant]"
    message, call = answer.output
    assert (message.type, call.type) == ("message", "function_call")
    assert (call.name, json.loads(call.arguments), len(call.call_id)) == ("weather", {"city": "Paris"}, 9)
    server.says("It rains.", ends=True)
    history = [{"role": "user", "content": "Paris?"}, *(item.model_dump(exclude_none=True) for item in answer.output)]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    answer = await client.responses.create(model=MODEL_ID, input=history, tools=[TOOL])  # type: ignore[list-item]
    assert answer.output_text == "It rains."
    assert prompt(server).endswith("</tool_call>[tool]rain[assistant]")


async def test_the_events_of_a_stream(server: Serving, client: openai.AsyncOpenAI) -> None:
    """The order and the fields of OpenAI's, as its client accumulates them."""
    server.says(f"<think>Rain?</think>Let me look.{CALL}", ends=True, per_step=4)
    async with client.responses.stream(model=MODEL_ID, input="Paris?", tools=[TOOL]) as stream:  # type: ignore[list-item]
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    merged = [kind for index, kind in enumerate(kinds) if not index or kinds[index - 1] != kind]
    assert merged == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Let me look."
    assert final.usage is not None and final.usage.output_tokens_details.reasoning_tokens == len(server.ids("Rain?"))


async def test_a_stream_and_an_answer_are_the_same(server: Serving) -> None:
    server.says(f"<think>Rain?</think>Let me look.{CALL}", ends=True, per_step=4)
    body = {"model": MODEL_ID, "input": "Paris?", "tools": [TOOL]}
    whole = (await server.client.post(ROUTE, json=body)).json()
    async with server.client.stream("POST", ROUTE, json={**body, "stream": True}) as response:
        text = (await response.aread()).decode()
    last = json.loads(text.rstrip().rpartition("data: ")[2])["response"]
    for answer in (whole, last):
        answer["id"] = answer["created_at"] = answer["completed_at"] = None
        for item in answer["output"]:
            item["id"] = item["call_id"] = None
    assert whole == last


async def test_reasoning_effort_reaches_the_template(server: Serving) -> None:
    server.says("x", ends=True)
    await server.client.post(ROUTE, json={"model": "", "input": "Hi", "reasoning": {"effort": "high"}})
    assert prompt(server) == "[user]Hi[high][assistant]"


async def test_structured_output(server: Serving, client: openai.AsyncOpenAI) -> None:
    server.says('{"city": "Rome"}', ends=True)
    text: Any = {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}}
    answer = await client.responses.create(model=MODEL_ID, input="Hi", text=text)
    assert '"city"' in server.shard.submits[-1].grammar.text
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"
    invalid = {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}
    assert (await refusal(server, text=invalid))[:2] == (400, "text.format")


async def test_log_probabilities(server: Serving, client: openai.AsyncOpenAI) -> None:
    server.says("ab", ends=True)
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await client.responses.create(model=MODEL_ID, input="Hi", **asked)
    part: Any = answer.output[0].content[0]  # type: ignore[union-attr]
    assert [entry.token for entry in part.logprobs] == ["a", "b"]
    assert len(part.logprobs[0].top_logprobs) == 2


async def test_what_needs_storage_is_rejected_with_an_error(server: Serving, client: openai.AsyncOpenAI) -> None:
    for name, value in (("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("background", True)):
        status, param, message = await refusal(server, **{name: value})
        assert (status, param) == (422, name) and "stores no responses" in message
    items = [{"type": "item_reference", "id": "msg_1"}]
    assert (await refusal(server, input=items))[:2] == (422, "input[0].item_reference")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        response = await server.client.request(method, f"{ROUTE}/resp_1{path}")
        assert response.status_code == 404
        assert response.json()["error"]["message"] == "Response with id 'resp_1' not found."
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [3]}, 400, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 422,
         "input[0].content[0].input_image"),
        ({"input": [{"type": "web_search_call"}]}, 422, "input[0].web_search_call"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": 5}]}, 400,
         "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": ""}]}, 400, "input[0].name"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, 400, "max_output_tokens"),
        ({"input": "a" * 100_000}, 400, "input"),
        ({"max_tokens": 3}, 422, "max_tokens"),
        ({"messages": []}, 422, "messages"),
        ({"n": 2}, 422, "n"),
        ({"tools": [{"type": "web_search"}]}, 422, "tools[0].web_search"),
        ({"truncation": "auto"}, 422, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format"),
        ({"temperature": 3}, 400, "temperature"),
        ({"model": "other"}, 404, "model"),
    ],
)  # fmt: skip
async def test_errors_name_the_fields_of_this_route(
    server: Serving, fields: dict[str, Any], status: int, param: str
) -> None:
    error = await refusal(server, **fields)
    assert error[:2] == (status, param)
    assert "messages[" not in error[2]


async def test_ignored_fields_are_named(server: Serving) -> None:
    server.says("x", ends=True)
    body = {"model": "", "input": [{"role": "user", "content": "Hi", "foo": 1}], "max_tool_calls": 3, "bar": 1}
    response = await server.client.post(ROUTE, json={**body, "reasoning": {"summary": "auto"}, "top_k": 5})
    names = response.headers["x-ignored-fields"].split(", ")
    assert sorted(names) == ["bar", "input[0].foo", "max_tool_calls", "reasoning.summary"]


async def test_a_failure_ends_the_stream(server: Serving) -> None:
    server.says("ab", error="out of memory")
    async with server.client.stream("POST", ROUTE, json={"model": "", "input": "Hi", "stream": True}) as response:
        text = (await response.aread()).decode()
    last = json.loads(text.rstrip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "out of memory" in last["response"]["error"]["message"]


async def test_the_tokens_of_an_input_are_counted(server: Serving, client: openai.AsyncOpenAI) -> None:
    counted = await client.responses.input_tokens.count(model=MODEL_ID, input="Hi", tools=[TOOL])  # type: ignore[list-item]
    assert counted.input_tokens == len(server.ids("[tools]weather[user]Hi[assistant]"))
    assert counted.object == "response.input_tokens"
