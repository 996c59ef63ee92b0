"""Reader of chat requests' messages and of the fields that the chat template gets in addition to them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import orjson

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.field_table import Route, check_unread
from lorikeet.router.schemas.fields import Fields
from lorikeet.router.text.templates.chat_template import TemplateOptions

MAX_TEMPLATE_KWARGS_BYTES = 16 << 10
MAX_TEMPLATE_BYTES = 1 << 20
_OWN_FIELDS = (
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
)
"""Names that `chat_template_kwargs` must not have: those of fields, and of transformers' own argument."""


@dataclass(frozen=True)
class Conversation:
    """What is rendered as the prompt."""

    messages: list[dict[str, Any]]
    options: TemplateOptions
    source: str | None = field(default=None, repr=False)
    """The request's own template."""
    named: dict[str, str] = field(default_factory=dict)
    """Variables of the template by name, and the fields that they came from."""

    @property
    def texts(self) -> list[str]:
        """What templates show of the messages."""
        calls = [json.dumps(each["tool_calls"], ensure_ascii=False) for each in self.messages if "tool_calls" in each]
        return [*(each["content"] for each in self.messages), *calls]

    @property
    def documents(self) -> list[str]:
        """The documents as JSON, whose length is about that of what a template shows of them."""
        return [orjson.dumps(each).decode() for each in self.options.variables.get("documents", ())]

    def ignored(self, unread: Iterable[str]) -> list[str]:
        """The fields of variables that the template does not read.

        Raises UnsupportedField for one that would change every other template's prompt.
        """
        fields = [self.named[name] for name in unread if name in self.named]
        for name in ("documents", "add_generation_prompt"):
            if name in fields:
                raise UnsupportedField(name, "is not read by the chat template of this model or adapter")
        return fields


def read_conversation(fields: Fields, config: RouterConfig) -> Conversation:
    """Type and check. Raises WrongJsonType or ValidationError."""
    messages = _messages(fields, config)
    source = _own_template(fields, config)
    variables = _template_kwargs(fields)
    named = {name: f"chat_template_kwargs.{name}" for name in variables}
    for name in ("reasoning_effort", "verbosity"):
        value = fields.text(name)
        if value is not None:
            variables[name], named[name] = value, name
    documents = _documents(fields, config)
    if documents:
        variables["documents"], named["documents"] = documents, "documents"
    wants_prompt = fields.optional_flag("add_generation_prompt")
    continues = fields.flag("continue_final_message")
    if continues and wants_prompt:
        raise ValidationError(
            "`continue_final_message` and `add_generation_prompt` cannot both be true", "continue_final_message"
        )
    if continues and not messages[-1]["content"]:
        raise ValidationError("`continue_final_message` needs a final message with text", "continue_final_message")
    if wants_prompt is False or continues:
        variables["add_generation_prompt"] = False
    if wants_prompt is False and not continues:
        named["add_generation_prompt"] = "add_generation_prompt"
    return Conversation(messages, TemplateOptions(variables, continues), source, named)


def _own_template(fields: Fields, config: RouterConfig) -> str | None:
    source = fields.text("chat_template")
    if not source:
        return None
    if not config.trust_request_chat_template:
        raise UnsupportedField("chat_template", "is accepted only with the flag --trust-request-chat-template")
    if len(source) > MAX_TEMPLATE_BYTES:
        raise ValidationError(f"`chat_template` must have at most {MAX_TEMPLATE_BYTES} characters", "chat_template")
    return source


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    variables = dict(fields.mapping("chat_template_kwargs") or {})
    for name in _OWN_FIELDS:
        if name in variables:
            path = f"chat_template_kwargs.{name}"
            raise ValidationError(f"`{path}` is not allowed: `{name}` is not a variable of the template alone", path)
    if variables and len(orjson.dumps(variables)) > MAX_TEMPLATE_KWARGS_BYTES:
        raise ValidationError(
            f"`chat_template_kwargs` must be at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON", "chat_template_kwargs"
        )
    return variables


def _documents(fields: Fields, config: RouterConfig) -> list[Any]:
    documents = fields.take("documents")
    if documents is None:
        return []
    if not isinstance(documents, list):
        raise ValidationError("`documents` must be a list of objects", "documents")
    _check_number(len(documents), "documents", config)
    if not all(isinstance(each, dict) for each in documents):
        raise ValidationError("`documents` must be a list of objects", "documents")
    return documents


def _messages(fields: Fields, config: RouterConfig) -> list[dict[str, Any]]:
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        raise ValidationError("`messages` must be a list of at least one message", "messages")
    _check_number(len(value), "messages", config)
    messages = [_message(fields, item, f"messages[{index}]") for index, item in enumerate(value)]
    _name_results(messages)
    return messages


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Results of tools get the name of the function that was called, which some templates show instead of the id."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


def _check_number(number: int, name: str, config: RouterConfig) -> None:
    """Before any element is looked at, since a list may be as long as the body."""
    if number > config.max_input_length:
        raise ValidationError(f"`{name}` supports up to {config.max_input_length} {name}. Given: {number}", name)


def _message(body: Fields, item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise ValidationError(f"`{where}` must be an object with a `role`", where)
    fields = body.nested(where, item)
    role = fields.take("role")
    content = _content(fields, fields.take("content"), f"{where}.content")
    # OpenAI's newer name of the role; chat templates have only the older one.
    message = {"role": "system" if role == "developer" else role, "content": content}
    message |= _texts(fields, where, ("name",))
    if role == "assistant":
        message |= _texts(fields, where, ("reasoning_content",))
        calls = fields.take("tool_calls")
        if calls not in (None, []):
            message["tool_calls"] = _tool_calls(fields, calls, f"{where}.tool_calls")
    elif role == "tool":
        message |= _texts(fields, where, ("tool_call_id",))
    check_unread(fields, Route.CHAT, "messages[].", f"{where}.")
    return message


def _texts(fields: Fields, where: str, names: tuple[str, ...]) -> dict[str, str]:
    """Fields of a message that are passed on as they are."""
    found = {name: value for name in names if (value := fields.take(name)) is not None}
    for name, value in found.items():
        if not isinstance(value, str):
            raise ValidationError(f"`{where}.{name}` must be a string", f"{where}.{name}")
    return found


def _tool_calls(message: Fields, calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls that an assistant made, with arguments as templates expect them: as an object, where they are one."""
    if not isinstance(calls, list):
        raise ValidationError(f"`{where}` must be a list", where)
    return [_tool_call(message, call, index, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(message: Fields, call: Any, index: int, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ValidationError(f"`{where}` must be an object with a `function`", where)
    fields = message.nested(f"tool_calls[{index}]", call)
    fields.expect("type")
    identity, inner = fields.take("id"), fields.child("function")
    name, text = inner.take("name"), inner.take("arguments")
    if not isinstance(name, str) or not isinstance(identity, str | None):
        raise ValidationError(f"`{where}` must have an `id` and a `function.name`, both strings", where)
    arguments = read_arguments(text, f"{where}.function.arguments")
    return {"type": "function", "id": identity, "function": {"name": name, "arguments": arguments}}


def read_arguments(value: Any, where: str) -> dict[str, Any] | str:
    """Arguments as a model wrote them: an empty object where there are none, and text that is no JSON object as it is.

    Raises ValidationError for a value that is neither a text nor an object.
    """
    if isinstance(value, dict):
        return value
    if not isinstance(value, str | None):
        raise ValidationError(f"`{where}` must be a string with a JSON object", where)
    if value is None or not value.strip():
        return {}
    try:
        read = json.loads(value, parse_constant=_refuse)  # not orjson, which rounds large integers
        json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return value
    return {} if read is None else read if isinstance(read, dict) else value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _content(message: Fields, content: Any, where: str) -> str:
    """The text of a message, with its parts joined, as templates expect it."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(f"`{where}` must be a string or a list of parts", where)
    return "".join(_part(message, part, index, f"{where}[{index}]") for index, part in enumerate(content))


def _part(message: Fields, part: Any, index: int, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        if isinstance(kind, str) and kind != "text":
            raise UnsupportedField(f"{where}.{kind[:32]}", "is not supported: this model reads text alone")
        raise ValidationError(f"`{where}` must be a part with `type` and `text`", where.rpartition("[")[0])
    if len(part) > 2:
        message.nested(f"content[{index}]", part).expect("type", "text")
    text: str = part["text"]
    return text
