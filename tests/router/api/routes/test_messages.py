"""Anthropic's `/v1/messages`: blocks in and out, events of streams, tools, thinking, errors and counts."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio
ROUTE = "/v1/messages"
TEMPLATE = (
    "{% if tools %}[tools]{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{% if enable_thinking %}[think]{% endif %}[assistant]{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
USER = [{"role": "user", "content": "Paris?"}]


@pytest.fixture(scope="module")
async def server(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("messages"), chat_template=TEMPLATE) as running:
        yield running


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL_ID, "messages": USER, "max_tokens": 200, **more}


def prompt(server: Serving) -> str:
    text: str = server.backend.decode(list(server.shard.submits[-1].prompt_ids), skip_special_tokens=False)
    return text


async def message(server: Serving, **more: Any) -> dict[str, Any]:
    response = await server.client.post(ROUTE, json=body(**more))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(server: Serving, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is its type."""
    async with server.client.stream("POST", ROUTE, json=body(stream=True, **more)) as response:
        assert response.status_code == 200
        text = (await response.aread()).decode()
    items = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        items.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {items[-1]['type']}"
    return items


async def test_a_text(server: Serving) -> None:
    server.says(" It rains.", ends=True)
    answer = await message(server, system="Be short.")
    assert prompt(server) == "[system]Be short.[user]Paris?[assistant]"
    assert answer.pop("id").startswith("msg_")
    num_prompt, num_output = len(server.ids(prompt(server))), len(server.ids(" It rains.")) + 1
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL_ID,
        "content": [{"type": "text", "text": " It rains.", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": num_output,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_why_an_answer_ends(server: Serving) -> None:
    server.says("abcdef")
    assert (await message(server, max_tokens=3))["stop_reason"] == "max_tokens"
    answer = await message(server, stop_sequences=["d", "c"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "c")
    assert answer["content"][0]["text"] == "ab"


async def test_blocks_of_a_conversation(server: Serving) -> None:
    server.says("x", ends=True)
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "T", "signature": ""},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "c"},
        ]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    response = await server.client.post(ROUTE, json=body(messages=turns, system=system))
    assert response.status_code == 200, response.text
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert prompt(server) == f"[system]S[user]a[assistant]<think>T</think>b{call}[tool]rain[user]c[assistant]"
    assert "x-ignored-fields" not in response.headers


async def test_a_text_before_a_result_stays_before_it(server: Serving) -> None:
    server.says("x", ends=True)
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    blocks = [{"type": "text", "text": "c"}, {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]
    turns = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": blocks}]
    await message(server, messages=turns)
    assert prompt(server).endswith("[user]c[tool]rain[assistant]")


async def test_a_final_message_of_the_assistant_is_continued(server: Serving) -> None:
    server.says("x", ends=True)
    await message(server, messages=[*USER, {"role": "assistant", "content": "It"}])
    assert prompt(server) == "[user]Paris?[assistant]It"


async def test_a_call(server: Serving) -> None:
    server.says(f"Let me look.{CALL}", ends=True)
    answer = await message(server, tools=[TOOL])
    assert prompt(server) == "[tools]weather[user]Paris?[assistant]"
    text, call = answer["content"]
    assert (text["text"], answer["stop_reason"]) == ("Let me look.", "tool_use")
    assert len(call.pop("id")) == 9
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
    answer = await message(server, tools=[TOOL], tool_choice={"type": "none"})
    assert [block["type"] for block in answer["content"]] == ["text"]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        server.says(CALL, ends=True)
        await message(server, tools=[TOOL], tool_choice=choice)
        assert server.shard.submits[-1].grammar.text


async def test_the_events_of_a_stream(server: Serving) -> None:
    server.says(f"<think>Rain?</think>Let me look.{CALL}", ends=True, per_step=4)
    items = await events(server, tools=[TOOL])
    kinds = [event["type"] for event in items]
    merged = [kind for index, kind in enumerate(kinds) if not index or kinds[index - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert merged == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    starts = [event["content_block"]["type"] for event in items if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in items if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Rain?"
    assert "".join(delta.get("text", "") for delta in deltas) == "Let me look."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"city": "Paris"}
    start, last = items[0]["message"], items[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    whole = await message(server, tools=[TOOL])
    assert last["usage"] == whole["usage"]
    assert last["usage"]["output_tokens_details"] == {"thinking_tokens": len(server.ids("Rain?"))}
    assert [block["type"] for block in whole["content"]] == starts


async def test_thinking_reaches_the_template(server: Serving) -> None:
    server.says("x", ends=True)
    response = await server.client.post(ROUTE, json=body(thinking={"type": "enabled", "budget_tokens": 1024}))
    assert prompt(server) == "[user]Paris?[think][assistant]"
    assert response.headers["x-ignored-fields"] == "thinking.budget_tokens"
    await message(server, thinking={"type": "disabled"})
    assert prompt(server) == "[user]Paris?[assistant]"


async def test_structured_output(server: Serving) -> None:
    server.says('{"city": "Rome"}', ends=True)
    await message(server, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert '"city"' in server.shard.submits[-1].grammar.text


@pytest.mark.parametrize(
    ("fields", "status", "kind", "part"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: Field required"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "`max_tokens` must be strictly positive"),
        ({"messages": []}, 400, "invalid_request_error", "at least one message is required"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error", "must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 422, "invalid_request_error",
         "`messages[0].content[0].image` is not supported"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "`temperature` must be >= 0 and <= 1"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 422, "invalid_request_error",
         "has no tools or containers of its own"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "`tool_choice` needs `tools`"),
        ({"stop": ["x"]}, 422, "invalid_request_error", "use `stop_sequences`"),
        ({"mcp_servers": [{}]}, 422, "invalid_request_error", "`mcp_servers`"),
        ({"thinking": {"type": "between_tools"}}, 422, "invalid_request_error", "`thinking.type`"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, 400, "invalid_request_error",
         "`output_config.format"),
        ({"model": "other"}, 404, "not_found_error", "does not exist"),
    ],
)  # fmt: skip
async def test_errors_have_anthropic_s_shape(
    server: Serving, fields: dict[str, Any], status: int, kind: str, part: str
) -> None:
    response = await server.client.post(ROUTE, json=body(**fields), headers={"x-request-id": "r1"})
    answer = response.json()
    assert (response.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind), response.text
    assert part in answer["error"]["message"]
    assert response.headers["request-id"] == answer["request_id"] == "r1"


async def test_a_failure_ends_the_stream(server: Serving) -> None:
    server.says("ab", error="out of memory")
    items = await events(server)
    assert items[-1]["type"] == "error" and items[-1]["error"]["type"] == "api_error"


async def test_tokens_are_counted(server: Serving) -> None:
    counted = {name: value for name, value in body(tools=[TOOL], system="S").items() if name != "max_tokens"}
    response = await server.client.post(f"{ROUTE}/count_tokens", json=counted)
    assert response.json() == {"input_tokens": len(server.ids("[tools]weather[system]S[user]Paris?[assistant]"))}


async def test_keys_come_in_anthropic_s_header(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> None:
    async with serving(tmp_path_factory.mktemp("keys"), api_keys_sha256=(sha256("k"),)) as closed:
        closed.says("x", ends=True)
        response = await closed.client.post(ROUTE, json=body())
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        assert (await closed.client.post(ROUTE, json=body(), headers=headers)).status_code == 200
