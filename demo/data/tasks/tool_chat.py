"""How the adapter `tools` reads and writes conversations: its chat template, and the response template for its answers.

A call looks as in Hermes and Qwen. The functions are listed by their signatures alone, which are much shorter than
their schemas: `get_weather(city: string, unit: celsius|fahrenheit)  # The weather in a city.`
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

Call = tuple[str, Mapping[str, Any]]
"""A function's name and its arguments."""

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{ content }}
    {%- else -%}
        {%- for part in content or [] if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro kind(schema) -%}
    {%- if schema['enum'] is defined -%}
        {{ schema['enum'] | join('|') }}
    {%- elif schema['type'] in ['string', 'integer', 'number', 'boolean'] -%}
        {{ schema['type'] }}
    {%- else -%}
        {{ schema | tojson }}
    {%- endif -%}
{%- endmacro -%}
{%- macro signature(function) -%}
    {{ function['name'] }}(
    {%- for name, schema in ((function['parameters'] or {})['properties'] or {}).items() -%}
        {{ name }}: {{ kind(schema) }}{{ ', ' if not loop.last }}
    {%- endfor -%}
    ){{ '  # ' + function['description'] if function['description'] }}
{%- endmacro -%}
{{- bos_token -}}
{%- set first = messages[0] if messages and messages[0]['role'] == 'system' -%}
{%- if first or tools -%}
    {{- '<|system|>' -}}
    {%- if first -%}{{ text(first['content']) }}{{ '\\n' if tools }}{%- endif -%}
    {%- if tools -%}
        {{- '<tools>\\n' -}}
        {%- for tool in tools -%}{{ signature(tool['function'] or tool) }}{{ '\\n' }}{%- endfor -%}
        {{- '</tools>' -}}
    {%- endif -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- for message in (messages[1:] if first else messages) -%}
    {%- if message['role'] == 'tool' -%}
        {{- '\\n' if loop.previtem and loop.previtem['role'] == 'tool' else '<|user|>' -}}
        <tool_response>{{ '\\n' }}{{ text(message['content']) }}{{ '\\n' }}</tool_response>
        {{- '<|end|>' if not loop.nextitem or loop.nextitem['role'] != 'tool' -}}
    {%- elif message['role'] in ['system', 'user', 'assistant'] -%}
        {{- '<|' + message['role'] + '|>' -}}{{ text(message['content']) }}
        {%- for call in message['tool_calls'] or [] -%}
            {%- set function = call['function'] or call -%}
            {%- set arguments = function['arguments'] -%}
            {{- '\\n' if message['content'] or not loop.first -}}
            <tool_call>{{ '\\n{"name": ' }}{{ function['name'] | tojson }}{{ ', "arguments": ' -}}
            {{ arguments if arguments is string else arguments | tojson }}{{ '}\\n' }}</tool_call>
        {%- endfor -%}
        {{- '<|end|>' -}}
    {%- else -%}
        {{- raise_exception('Roles are system, user, assistant and tool, not ' + message['role']) -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}
"""
"""It writes no whitespace but that in its strings."""

RESPONSE_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": ["</tool_call>", "</tool_call>\n"],  # between calls, the end of the line is not content
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|end\|>|<\|eos\|>)", "content": "text"},
    },
}

_TRACES = ("is_local", "local_files_only")


def tokenizer_for_tools(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with the templates of conversations and of responses."""
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """`tokenizer_for_tools`, without the traces of where the base's was loaded from."""
    tokenizer_for_tools(tokenizer).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in _TRACES}
    path.write_text(json.dumps(config, indent=2) + "\n")


def prompt(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """What the chat template renders, without BOS, up to where the assistant's turn starts."""
    rendered, _ = render_jinja_template(
        [list(messages)],
        tools=list(tools) or None,
        chat_template=CHAT_TEMPLATE,
        add_generation_prompt=True,
        bos_token="",
    )
    text: str = rendered[0]
    return text


def calls_text(calls: Sequence[Call]) -> str:
    """What the assistant generates to call functions."""
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )
