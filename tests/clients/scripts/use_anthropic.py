"""Anthropic's client: messages, streams, tools, counts, errors."""

import os

import anthropic

print("anthropic", anthropic.__version__)
client = anthropic.Anthropic(base_url=os.environ["URL"], api_key=os.environ["KEY"], max_retries=0)
model = os.environ["MODEL"]
messages = [{"role": "user", "content": "def add(a, b):"}]
schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
tools = [{"name": "weather", "description": "The weather", "input_schema": schema}]

answer = client.messages.create(
    model=model, messages=messages, max_tokens=8, system="Be short.", extra_body={"temperature": 0}
)
assert answer.content[0].text
with client.messages.stream(
    model=model, messages=messages, max_tokens=8, system="Be short.", extra_body={"temperature": 0}
) as stream:
    assert "".join(stream.text_stream) == answer.content[0].text
    final = stream.get_final_message()
assert (final.stop_reason, final.usage.output_tokens) == (answer.stop_reason, answer.usage.output_tokens)
called = client.messages.create(
    model=model, messages=messages, max_tokens=100, tools=tools, tool_choice={"type": "any"}
)
assert called.stop_reason == "tool_use"
block = next(each for each in called.content if each.type == "tool_use")
assert block.input["city"] in ("Rome", "Paris")
result = {"type": "tool_result", "tool_use_id": block.id, "content": "It rains."}
turns = [*messages, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert client.messages.create(model=model, messages=turns, max_tokens=8, tools=tools).content
with client.messages.stream(
    model=model, messages=messages, max_tokens=100, tools=tools, tool_choice={"type": "tool", "name": "weather"}
) as stream:
    assert stream.get_final_message().content[-1].input["city"] in ("Rome", "Paris")
assert client.messages.count_tokens(model=model, messages=messages).input_tokens > 3
for error, key, fields in (
    (anthropic.NotFoundError, os.environ["KEY"], {"model": "none"}),
    (anthropic.BadRequestError, os.environ["KEY"], {"max_tokens": 0}),
    (anthropic.AuthenticationError, "wrong", {}),
):
    given = {"model": model, "messages": messages, "max_tokens": 8, **fields}
    try:
        client.with_options(api_key=key).messages.create(**given)
    except error as raised:
        assert raised.request_id
    else:
        raise AssertionError(f"{fields} must be rejected")
