"""Chat templates: finds the one of a model folder, and renders messages as a prompt.

It uses Jinja's immutable sandbox, with the functions and filters that model authors expect.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorikeet.router.errors import ChatTemplateError

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the final message to find its end in the prompt, as transformers does."""


@dataclass(frozen=True)
class TemplateOptions:
    """How messages are rendered."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, in addition to the messages and special tokens."""
    continue_final_message: bool = False
    """Whether the prompt ends within the final message, so that the output continues it."""

    @property
    def num_chars(self) -> int:
        """Characters of the variables as JSON."""
        return len(json.dumps(dict(self.variables))) if self.variables else 0


@dataclass(frozen=True)
class Rendered:
    """A prompt."""

    text: str
    unread: tuple[str, ...] = ()
    """Variables that the template does not read."""


NO_OPTIONS = TemplateOptions()


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _Arguments(dict[str, Any]):
    """Arguments of a call, which some templates write with `+`, as a text: then they are JSON."""

    def __add__(self, text: str) -> str:
        return _to_json(self) + text

    def __radd__(self, text: str) -> str:
        return text + _to_json(self)


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with `_Arguments`."""
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_with_arguments_of(call) for call in calls]}


def _with_arguments_of(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": _Arguments(function["arguments"])}}


class ChatTemplate:
    """One compiled template and the special tokens that it may use."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        self.problem = ""
        """Why it cannot be compiled."""
        self._names: frozenset[str] = frozenset()
        """Variables that the template reads."""
        try:
            self._template = environment.from_string(source)
            self._names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:  # all other routes are still served
            self.problem = f"{error} (line {getattr(error, 'lineno', '?')} of the model's chat template)"

    def render(self, messages: list[dict[str, Any]], options: TemplateOptions = NO_OPTIONS) -> str:
        """The prompt for `messages`. Raises ChatTemplateError with the template's own message."""
        if self.problem:
            raise ChatTemplateError(self.problem)
        if options.continue_final_message:
            last = messages[-1]
            tagged = [*messages[:-1], {**last, "content": last["content"] + _CONTINUE_TAG}]
            return _until_tag(self._text(tagged, options.variables), last["content"])
        return self._text(messages, options.variables)

    def unread(self, names: Iterable[str]) -> tuple[str, ...]:
        """The variables among `names` that the template does not read."""
        return tuple(name for name in names if name not in self._names)

    def _text(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            text = self._template.render(
                {
                    "messages": list(map(_with_arguments, messages)),
                    "add_generation_prompt": True,
                    **self._special_tokens,
                    **variables,
                }
            )
            text.encode()
        except UnicodeEncodeError:
            raise ChatTemplateError(
                "the template's text is not valid Unicode: it has half of a surrogate pair"
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error
        if not text:
            raise ChatTemplateError("the template's text is empty")
        return text


def _until_tag(text: str, final_message: str) -> str:
    """A prompt up to the end of its final message. Raises ChatTemplateError where the template leaves it out."""
    end = text.rfind(_CONTINUE_TAG.strip())
    if end < 0 or final_message.strip() not in text:
        raise ChatTemplateError("the chat template does not show the final message, which cannot be continued")
    # Without its space the template trims messages, and this one's end too.
    return text[:end] if text.startswith(_CONTINUE_TAG, end) else text[:end].rstrip()


def find_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The source of the default chat template: the file of the template first, then the tokenizer's configuration."""
    own_file, single = folder / "chat_template.jinja", folder / "chat_template.json"
    if own_file.is_file():
        return own_file.read_text()
    return template_of(tokenizer_config, json.loads(single.read_text()) if single.is_file() else {})


def template_of(tokenizer_config: dict[str, Any], single: dict[str, Any], *, for_tools: bool = False) -> str | None:
    """The default template of the tokenizer's configuration, or of chat_template.json. With `for_tools` the one that is
    only used with tools, if there is one.
    """
    template: Any = tokenizer_config.get("chat_template")
    if template is None:
        template = single.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        if for_tools:
            return by_name.get("tool_use")
        template = by_name.get("default") or (next(iter(by_name.values())) if len(by_name) == 1 else None)
    return None if for_tools else template
