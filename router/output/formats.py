"""How models write reasoning and tool calls: response templates in the form of transformers.

A model or adapter has its own in tokenizer_config.json (`response_template`). For the others there is one per family
here, chosen by what the chat template contains. From a template follow the syntax of a call, as parts that a grammar is
built from, and how the reasoning is written.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.text.stop import ReasoningSyntax, Start

Template = dict[str, Any]
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field."""
MAX_PREFIX = 1 << 16


@dataclass(frozen=True)
class ResponseTemplate:
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
        texts = [region for name, region in fields if name not in ("tool_calls", *REASONING)]
        return next((region for region in texts if "open" in region or "open_pattern" in region), None)

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
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


@lru_cache(64)
def format_of(chat_template: str) -> ResponseTemplate | None:
    """The format of a family, by its chat template; None for one that is not known."""
    for is_of_family, make in _FAMILIES:
        if is_of_family(chat_template):
            next_part = "<|start|>assistant" if make is _harmony else ""
            return ResponseTemplate(make(chat_template), is_own=False, next_part=next_part)
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


_sre: Any = re._parser  # type: ignore[attr-defined]  # the only reader of patterns in the standard library


@dataclass(frozen=True)
class Slot:
    """A place for the function's name, a parameter's name or its value."""

    name: str


@dataclass(frozen=True)
class Space:
    """Optional white space."""


Part = str | Slot | Space
NAME, KEY, VALUE = Slot("name"), Slot("key"), Slot("value")


@dataclass(frozen=True)
class CallSyntax:
    """One call is `opening head arguments tail closing`; a list of calls shares its opening and closing."""

    opening: tuple[Part, ...]
    head: tuple[Part, ...]
    tail: str
    closing: tuple[Part, ...] | None
    """None where the end of the output ends the call."""
    repeats: bool
    is_list: bool = False
    parameter: tuple[Part, ...] | None = None
    """How one parameter is written; None where the arguments are a JSON object."""

    @property
    def keys(self) -> tuple[str, str]:
        """Keys of the name and of the arguments in a call's JSON object."""
        name, arguments = re.findall(r'"(\w+)": ', "".join(part for part in self.head if isinstance(part, str)))
        return name, arguments

    @property
    def trigger(self) -> str:
        """The literal that every call starts with, "" without one."""
        first = self.opening[0] if self.opening else ""
        return first if isinstance(first, str) else ""


def syntax_of(form: ResponseTemplate) -> CallSyntax | None:
    """None for a format whose calls cannot be constrained."""
    try:
        return _syntax(form.template["fields"]["tool_calls"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, re.error, RecursionError):
        return None


def literal_of(field: dict[str, Any], literal: str, pattern: str) -> tuple[Part, ...]:
    """The shortest text that opens or closes a region. Raises ValueError where there is no single one."""
    if (text := field.get(literal)) is not None:
        return (text if isinstance(text, str) else text[0],)
    return parts_of(field[pattern]) if field.get(pattern) is not None else ()


def _closing(field: dict[str, Any]) -> tuple[Part, ...] | None:
    """None where the end of the output ends the call, as where several texts do."""
    if len([field["close"]] if isinstance(field.get("close"), str) else field.get("close", [])) > 1:
        return None
    if "close_pattern" in field and str(_sre.parse(field["close_pattern"], re.DOTALL)[0][0]) == "BRANCH":
        return None
    return literal_of(field, "close", "close_pattern") or None


def _syntax(field: dict[str, Any]) -> CallSyntax:
    opening = literal_of(field, "open", "open_pattern")
    closing = _closing(field)
    repeats = bool(field.get("repeats"))
    if field.get("content") == "xml-inline":
        parameter = parts_of(field["content_args"]["tag_pattern"])
        if _paths(field["transform"]) != ("name", "content") or not {KEY, VALUE} <= set(parameter):
            raise ValueError
        return CallSyntax(opening, (), "", closing, repeats, parameter=parameter)
    if field.get("content") != "json" or field.get("content_args", {}).keys() - {"allow_non_json"}:
        raise ValueError
    if field.get("transform_each"):
        name, arguments = _paths(field["transform"])
        return CallSyntax(opening, _object(name, arguments), "}", closing, repeats, is_list=True)
    name, arguments = _paths(field.get("transform", "{content}"))
    if NAME in opening:
        if (name, arguments) != ("name", "content"):
            raise ValueError
        return CallSyntax(opening, (), "", closing, repeats)
    keys = name.partition("content.")[2], arguments.partition("content.")[2]
    return CallSyntax(opening, _object(*keys), "}", closing, repeats)


def _object(name: str, arguments: str) -> tuple[Part, ...]:
    if not re.fullmatch(r"\w+", name) or not re.fullmatch(r"\w+", arguments):
        raise ValueError
    return (f'{{"{name}": "', NAME, f'", "{arguments}": ')


def _paths(transform: Any) -> tuple[str, str]:
    """Where a transform takes the name and the arguments from."""
    function = transform.get("function", transform) if isinstance(transform, dict) else transform
    if isinstance(function, str):
        path = function.strip("{}")
        return f"{path}.name", f"{path}.arguments"
    return function["name"].strip("{}"), function["arguments"].strip("{}")


def parts_of(pattern: str) -> tuple[Part, ...]:
    """The parts of the shortest text that a pattern matches. Raises ValueError where there is no single one."""
    parts: list[Part] = []
    for part in _of_nodes(_sre.parse(pattern, re.DOTALL)):
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif not (isinstance(part, Space) and parts and parts[-1] == part):
            parts.append(part)
    return tuple(parts)


def _of_nodes(nodes: Any) -> list[Part]:
    names = {number: name for name, number in nodes.state.groupdict.items()}
    parts: list[Part] = []
    for kind, value in nodes:
        match str(kind):
            case "LITERAL":
                parts.append(chr(value))
            case "IN" if str(value[0][0]) == "LITERAL":
                parts.append(chr(value[0][1]))
            case "AT" | "ASSERT" | "ASSERT_NOT":
                pass
            case "BRANCH":
                parts += _of_nodes(value[1][0])
            case "SUBPATTERN":
                number, _, _, inner = value
                parts += [Slot(names[number])] if number in names else _of_nodes(inner)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, _, inner = value
                if _is_space(inner):
                    parts.append("\n" if least else Space())
                else:
                    parts += least * _of_nodes(inner) if least else []
            case _:
                raise ValueError(f"{kind} has no single text")
    return parts


def _is_space(nodes: Any) -> bool:
    return len(nodes) == 1 and (
        str(nodes[0]) == "(IN, [(CATEGORY, CATEGORY_SPACE)])" or nodes[0][1] in (ord(" "), ord("\n"))
    )


def reasoning_of(form: ResponseTemplate, prompt: str, open_field: str | None) -> ReasoningSyntax | None:
    """None for a format without reasoning. `open_field` is the region in which the prompt ends.

    Raises ChatTemplateError where the prompt opens a reasoning of which no text is known that closes it.
    """
    name = form.reasoning_field
    if not name:
        return None
    field = form.template["fields"][name]
    opening, closings = _text(field, "open"), _closings(field)
    is_open = open_field == name
    if not closings or not (opening or is_open):
        if is_open:
            raise ChatTemplateError(f"the response template has no text that closes `{name}`")
        return None
    is_closed = prompt.rstrip().endswith(closings)
    start = Start.OPEN if is_open else Start.CLOSED if is_closed else Start.FREE
    text_opening = _text(form.text_field or {}, "open")
    return ReasoningSyntax(opening, closings, start, tuple(text for text in (form.next_part, text_opening) if text))


def text_opening(form: ResponseTemplate) -> str:
    """What the text of an answer begins with, where it has a mark of its own."""
    return _text(form.text_field or {}, "open")


def _closings(field: dict[str, Any]) -> tuple[str, ...]:
    """The texts that close a region, none where a pattern has no single one."""
    close = field.get("close")
    if isinstance(close, list):
        return tuple(text for text in close if isinstance(text, str) and text)
    text = _text(field, "close")
    return (text,) if text else ()


def _text(field: dict[str, Any], name: str) -> str:
    """The single text that opens or closes a region, "" where there is none."""
    try:
        parts: tuple[Part, ...] = literal_of(field, name, f"{name}_pattern")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
        return ""
    return "".join(part for part in parts if isinstance(part, str)) if all(isinstance(p, str) for p in parts) else ""
