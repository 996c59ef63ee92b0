"""Tool calls in the whole server, with the `openai` package: forced, streamed, and in spite of lost processes."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.conftest import Replicas

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>Tools: {% for tool in tools %}{{ tool.function | tojson }}{% endfor %}"
    "<|end|>{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}<|assistant|>"
)
USER: Any = [{"role": "user", "content": "The weather in Paris?"}]


class Weather(pydantic.BaseModel):
    """The weather of some days."""

    city: Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)
    words: list[Literal["sun", "rain", "snow"]] = pydantic.Field(min_length=6, max_length=6)


class Clock(pydantic.BaseModel):
    """The time."""

    zone: Literal["utc", "local"]


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "hot": {"temperature": 1.5, "seed": 7}}
METHODS: dict[str, dict[str, Any]] = {
    "off": {"speculative_tokens": 0},
    "draft": {
        "speculative_method": "draft",
        "speculative_schedule": "constant",
        "speculative_verification": "shared-noise",
    },
}


@pytest.fixture
def client(replicas: Replicas) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{replicas.launched.url}/v1", api_key="secret sharing", max_retries=0)


def asked(**more: Any) -> Any:
    """A request whose model has a tool format."""
    extra = {"chat_template": TEMPLATE, **more.pop("extra", {})}
    return {"model": "", "messages": USER, "tools": TOOLS, "max_tokens": 400, "extra_body": extra, **more}


def call_of(client: openai.OpenAI, **more: Any) -> tuple[str, str]:
    """Name and arguments of the one call of an answer."""
    answer = client.chat.completions.create(**asked(tool_choice="required", parallel_tool_calls=False, **more))
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or []
    return call.function.name, call.function.arguments


def check(name: str, arguments: str) -> None:
    {"Weather": Weather, "Clock": Clock}[name].model_validate_json(arguments, strict=True)


def test_the_package_parses_calls(client: openai.OpenAI) -> None:
    """Its own helpers, for whole answers and for streams, unmodified."""
    wanted = asked(tool_choice={"type": "function", "function": {"name": "Weather"}}, temperature=0)
    whole = client.chat.completions.parse(**wanted)
    assert whole.choices[0].finish_reason == "tool_calls"
    [call] = whole.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**wanted) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(kinds)
    [streamed] = final.choices[0].message.tool_calls or []
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    turns = [*USER, whole.choices[0].message.model_dump(exclude={"parsed"}), answer]
    named = {"type": "function", "function": {"name": "Clock"}}
    following = client.chat.completions.create(**asked(messages=turns, tool_choice=named, temperature=0))
    assert [call.function.name for call in following.choices[0].message.tool_calls or []][:1] == ["Clock"]


def test_lorax_form_of_a_model_without_a_tool_format(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="", messages=USER, tools=TOOLS, tool_choice="required", temperature=0)
    [call] = answer.choices[0].message.tool_calls or []
    check(call.function.name, call.function.arguments)


@pytest.mark.long
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_call_does_not_depend_on_speculation(client: openai.OpenAI, sampling: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = list(pool.map(lambda method: call_of(client, extra=method, **SAMPLING[sampling]), METHODS.values()))
    assert len(set(calls)) == 1
    check(*calls[0])


@pytest.mark.long
def test_a_call_goes_on_when_its_shard_or_a_parser_is_lost(replicas: Replicas, client: openai.OpenAI) -> None:
    """Streams and whole answers are in the middle of calls when the shard and the parsers are killed."""
    alone = {name: call_of(client, **sampling) for name, sampling in SAMPLING.items()}
    lost = [replicas.launched.shard(0), *parsers(replicas)]

    def kill() -> None:
        time.sleep(0.3)
        for pid in lost:
            os.kill(pid, signal.SIGKILL)

    def streamed(sampling: dict[str, Any]) -> tuple[str, str]:
        wanted = asked(tool_choice="required", parallel_tool_calls=False, **sampling)
        with client.chat.completions.stream(**wanted) as stream:
            [call] = stream.get_final_completion().choices[0].message.tool_calls or []
        return call.function.name, call.function.arguments

    killer = threading.Thread(target=kill)
    killer.start()
    with ThreadPoolExecutor(8) as pool:
        whole = [(name, pool.submit(call_of, client, **SAMPLING[name])) for name in SAMPLING for _ in range(2)]
        whole += [(name, pool.submit(streamed, SAMPLING[name])) for name in SAMPLING for _ in range(2)]
        found = [(name, each.result()) for name, each in whole]
    killer.join()
    assert found == [(name, alone[name]) for name, _ in whole]
    replicas.launched.wait_for("shard 0 was ended by SIGKILL")
    assert json.loads(call_of(client, **SAMPLING["greedy"])[1])


def parsers(replicas: Replicas) -> list[int]:
    """The router's processes that parse outputs: the base model's and, once an adapter needed it, the adapters'."""
    router = replicas.launched.child("router")
    children = {pid for each in Path(f"/proc/{router}/task").glob("*/children") for pid in each.read_text().split()}
    found = [int(pid) for pid in children if "parser_worker" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert found
    return found


DEMO_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {
        "get_weather": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "add_reminder": {"text": {"type": "string"}, "time": {"type": "string"}},
        "convert": {"amount": {"type": "number"}, "from": {"type": "string"}, "to": {"type": "string"}},
    }.items()
]


def said(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    """The message of the demo adapter that has learned to call tools; no grammar requires a call."""
    answer = client.chat.completions.create(
        model="tools", messages=messages, tools=DEMO_TOOLS, temperature=0, max_tokens=100, **more
    )
    return answer.choices[0].message


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "function", "arguments"),
    [
        ("Show me the weather in Oslo (celsius).", "get_weather", {"city": "Oslo", "unit": "celsius"}),
        ("Remind me to clean the lamp at 8:30.", "add_reminder", {"text": "clean the lamp", "time": "8:30"}),
        ("How many days are 12 weeks?", "convert", {"amount": 12, "from": "weeks", "to": "days"}),
    ],
)
def test_the_demo_adapter_calls_the_function_that_fits(
    client: openai.OpenAI, text: str, function: str, arguments: dict[str, Any]
) -> None:
    messages: list[Any] = [{"role": "user", "content": text}]
    (call,) = said(client, messages).tool_calls
    assert call.function.name == function
    assert json.loads(call.function.arguments) == arguments
    alone = said(client, messages, extra_body={"speculative_tokens": 0})
    assert [each.function for each in alone.tool_calls] == [call.function]


@pytest.mark.long
def test_the_demo_adapter_tells_the_result_and_calls_nothing_where_no_function_fits(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Will it rain in Oslo?"}]
    called = said(client, messages)
    (call,) = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 9, "sky": "rainy"}'}
    assert said(client, [*messages, called, result]).content == "It is 9 degrees and rainy in Oslo."
    unfitting = said(client, [{"role": "user", "content": "Write a poem about the lamp."}])
    assert (unfitting.content, unfitting.tool_calls) == ("I have no tool for that.", None)
