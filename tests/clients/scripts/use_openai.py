"""OpenAI's client: chat, streams, completions, tools, structured output, responses, models."""

import json
import os

import openai
from pydantic import BaseModel


class City(BaseModel):
    name: str


print("openai", openai.__version__)
client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key=os.environ["KEY"], max_retries=0)
model = os.environ["MODEL"]
messages = [{"role": "user", "content": "def add(a, b):"}]
schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}

assert model in [each.id for each in client.models.list()]
answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8, seed=1, logprobs=True)
text = answer.choices[0].message.content
assert text and answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) + (
    answer.choices[0].finish_reason == "stop"
)
stream = client.chat.completions.create(model=model, messages=messages, max_tokens=8, seed=1, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
assert (
    client.completions.create(model=model, prompt="def add", max_tokens=4, echo=True).choices[0].text[:7] == "def add"
)
tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
call = client.chat.completions.create(model=model, messages=messages, tools=[tool], tool_choice="required")
function = call.choices[0].message.tool_calls[0].function
assert function.name == "weather" and json.loads(function.arguments)["city"] in ("Rome", "Paris")
parsed = client.chat.completions.parse(model=model, messages=messages, response_format=City, max_tokens=200, seed=3)
assert isinstance(parsed.choices[0].message.parsed, City)
response = client.responses.create(model=model, input="def add(a, b):", max_output_tokens=8)
assert response.output_text and response.store is False
with client.responses.stream(model=model, input="def add(a, b):", max_output_tokens=400) as events:
    assert events.get_final_response().output_text
called = client.responses.create(
    model=model,
    input="Rome?",
    tools=[{"type": "function", "name": "weather", "parameters": schema, "strict": False}],
    tool_choice="required",
)
assert json.loads(called.output[0].arguments)["city"] in ("Rome", "Paris")
try:
    client.responses.create(model=model, input="x", previous_response_id="resp_1")
except openai.UnprocessableEntityError as error:
    assert error.param == "previous_response_id"
else:
    raise AssertionError("it must be rejected")
