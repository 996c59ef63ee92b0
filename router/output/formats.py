"""How models write reasoning and tool calls: response templates in the form of transformers.

A model or adapter has its own in tokenizer_config.json (`response_template`). For the others there is one per family
here, chosen by what the chat template contains.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Template = dict[str, Any]
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field."""
MAX_PREFIX = 1 << 16


@dataclass(frozen=True)
class OutputFormat:
    """One response template."""

    template: Template
    is_own: bool = True
    """Whether it came from tokenizer_config.json of the model or adapter."""
    next_part: str = ""
    """What the model writes between two parts of an output, such as its reasoning and a call."""

    @property
    def has_reasoning(self) -> bool:
        fields = self.template.get("fields")
        return isinstance(fields, dict) and any(name in fields for name in REASONING)

    @property
    def has_tools(self) -> bool:
        fields = self.template.get("fields")
        return isinstance(fields, dict) and isinstance(fields.get("tool_calls"), dict)

    def shown(self, special: Mapping[str, int]) -> frozenset[int]:
        """The special tokens that the template names, by their texts: the output's text must contain them."""
        texts = "\n".join(_texts(self.template))
        return frozenset(number for text, number in special.items() if text in texts or re.escape(text) in texts)

    @property
    def reasoning_field(self) -> str:
        """The name of the field, "" without one."""
        return next((name for name in REASONING if name in self.template["fields"]), "") if self.has_reasoning else ""

    @property
    def text_field(self) -> dict[str, Any] | None:
        """The field of texts that are neither reasoning nor calls, where they have a mark of their own."""
        fields = self.template["fields"].items()
        texts = [each for name, each in fields if name not in ("tool_calls", *REASONING)]
        return next((each for each in texts if "open" in each or "open_pattern" in each), None)

    def prefix(self, prompt: str, final_message: str = "") -> str:
        """The end of the prompt that the output continues, as far as the parser needs it: an open reasoning.
        `final_message` is the message in which the prompt ends, if it does.
        """
        if self.is_own:
            return prompt[-MAX_PREFIX:]
        field = self.template["fields"].get(self.reasoning_field, {})
        opening, closing = field.get("open"), field.get("close")
        if not isinstance(opening, str) or not isinstance(closing, str):
            return ""
        end = prompt[len(prompt.rstrip()) - len(opening) :]
        if end.startswith(opening):
            return end
        start = final_message.rfind(opening)
        return final_message[start:] if start > final_message.rfind(closing) else ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


@lru_cache(64)
def format_of(chat_template: str) -> OutputFormat | None:
    """The format of a family, by its chat template; None for one that is not known."""
    for is_of_family, make in _FAMILIES:
        if is_of_family(chat_template):
            next_part = "<|start|>assistant" if make is _harmony else ""
            return OutputFormat(make(chat_template), is_own=False, next_part=next_part)
    return None


def _template(source: str, fields: dict[str, Any], end: str) -> Template:
    """With reasoning where the chat template mentions it. The text after the prefix starts at once."""
    reasoning = {"reasoning_content": {"open": "<think>", "close": "</think>"}} if "<think>" in source else {}
    content = {"content": {"close_pattern": end}} if end else {"content": {}}
    return {"start_anchor_pattern": r"\A", "fields": {**reasoning, **fields, **content}}


def _hermes(source: str) -> Template:
    """Hermes, Qwen 2.5 and 3: a JSON object between tags."""
    calls = {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
    }
    return _template(source, {"tool_calls": calls}, "")


def _qwen_coder(source: str) -> Template:
    """Qwen3-Coder, Qwen 3.5: tags for the function and each parameter."""
    calls = {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    return _template(source, {"tool_calls": calls}, "")


def _glm(source: str) -> Template:
    """GLM 4: the function's name between tags, then tags for each parameter."""
    calls = {
        "open_pattern": r"<tool_call>(?P<name>[^<\s]+)",
        "close": "</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    return _template(source, {"tool_calls": calls}, "")


def _gemma(source: str) -> Template:
    """Gemma 4: an object with keys without quotes, and tokens for the quotes of texts."""
    calls = {
        "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    reasoning = {"open": "<|channel>thought\n", "close": "<channel|>"}
    fields = {"reasoning_content": reasoning, "tool_calls": calls}
    return _template(source, fields, r"<turn\|>|<\|tool_response>|<eos>")


def _jamba(source: str) -> Template:
    """Jamba: a list of JSON objects between tags."""
    calls = {
        "open": "<tool_calls>",
        "close": "</tool_calls>",
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    }
    return _template(source, {"tool_calls": calls}, "")


def _command(source: str) -> Template:
    """Command R7B and A: every part of the output is between tokens."""
    calls = {
        "open": "<|START_ACTION|>",
        "close": "<|END_ACTION|>",
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
    }
    reasoning = {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"}
    final = {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>", "repeats": True}
    fields = {"reasoning_content": reasoning, "tool_calls": calls, "final": final, "content": {}}
    return {"start_anchor_pattern": r"\A", "fields": fields}


def _llama(source: str) -> Template:
    """Llama 3.1 to 4: the whole output is a JSON object, after a token or alone."""
    token = r"<\|python_tag\|>|<\|python_start\|>(?:<\|python_end\|>)?"
    calls = {
        "open_pattern": rf"(?:\A\s*|(?:{token})\s*)(?=\{{\s*\"name\"\s*:)",
        "close": ["<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>"],
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
    }
    return _template(source, {"tool_calls": calls}, "")


def _mistral(source: str) -> Template:
    """Mistral up to version 3: a list of JSON objects."""
    calls = {
        "open": "[TOOL_CALLS]",
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    }
    return _template(source, {"tool_calls": calls}, "")


def _mistral_named(source: str) -> Template:
    """Mistral from version 11: each call has its own token, and the name before its arguments."""
    calls = {
        "open_pattern": r"(?:\[TOOL_CALLS\]|(?<=\[TOOL_CALLS\]))(?P<name>[^\[\]{}\s]+)"
        r"(?:\[CALL_ID\][^\[\]{}\s]*)?\[ARGS\]",
        "close": ["</s>", "[TOOL_CALLS]"],  # the next call begins with its name then
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    return _template(source, {"tool_calls": calls}, "")


def _harmony(source: str) -> Template:
    """gpt-oss: every part of the output is a message with a channel."""
    start = r"(?:<\|start\|>assistant)?"
    calls = {
        "open_pattern": start
        + r"(?:<\|channel\|>(?:commentary|analysis) to=functions\.| to=functions\.)(?P<name>[\w.-]+)"
        + r"(?:<\|channel\|>\w+)?(?:\s*<\|constrain\|>\s*json|\s*json|\s*code)?\s*<\|message\|>",
        "close": ["<|call|>", "<|end|>"],
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    reasoning = {"open_pattern": start + r"<\|channel\|>analysis<\|message\|>", "close": "<|end|>"}
    final = {
        "open_pattern": start + r"<\|channel\|>(?:final|commentary)(?:\s*<\|constrain\|>\s*\w+)?<\|message\|>",
        "close": ["<|end|>", "<|return|>"],
        "repeats": True,
    }
    fields = {"reasoning_content": reasoning, "tool_calls": calls, "final": final, "content": {}}
    return {"start_anchor_pattern": r"\A", "fields": fields}


_FAMILIES: tuple[tuple[Callable[[str], bool], Callable[[str], Template]], ...] = (
    (lambda source: "<|channel|>" in source and "<|message|>" in source and "functions" in source, _harmony),
    (lambda source: "<|tool_call>call:" in source, _gemma),
    (lambda source: "<|START_ACTION|>" in source, _command),
    (lambda source: "[TOOL_CALLS]" in source and "[ARGS]" in source, _mistral_named),
    (lambda source: "[TOOL_CALLS]" in source, _mistral),
    (lambda source: "<tool_call>" in source and "<function=" in source, _qwen_coder),
    (lambda source: "<tool_call>" in source and "<arg_key>" in source, _glm),
    (lambda source: "<tool_call>" in source, _hermes),
    (lambda source: "<tool_calls>" in source, _jamba),
    (
        lambda source: (
            "<|python_tag|>" in source
            or "<|python_start|>" in source
            or '{"name": function name, "parameters"' in source
        ),
        _llama,
    ),
    (lambda source: "<think>" in source, lambda source: _template(source, {}, "")),
)
"""A test of the chat template, and the format of the family."""
