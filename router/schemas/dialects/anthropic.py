"""Reader of the body of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Sequence
from typing import Any

import orjson

from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.dialects.translated import (
    Translated,
    items_of,
    object_of,
    pass_others,
    refuse_others,
    text_of,
)
from lorikeet.router.schemas.fields import Fields

NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "user": "metadata",
    "parallel_tool_calls": "tool_choice",
    "chat_template_kwargs": "thinking",
}
"""Fields of chat completions, and what they are called here."""
_OTHERS = {**NAMES, "max_completion_tokens": "max_tokens", "functions": "tools"}
_SERVERS = "is not supported by this server, which has no tools or containers of its own"
_THINKING = ("enable_thinking", "thinking")
"""Variables of chat templates by which models turn reasoning on and off."""


def translate(body: dict[str, Any], *, generates: bool = True) -> Translated:
    """`generates` is false for a body whose tokens are counted. Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    refuse_others(fields, _OTHERS)
    for name in ("container", "mcp_servers", "context_management"):
        if fields.take(name):
            raise UnsupportedField(name, _SERVERS)
    if fields.take("n") not in (None, 1):
        raise UnsupportedField("n", "is not a field of this route: send several requests")
    max_tokens = fields.integer("max_tokens", "u32")
    if max_tokens is None and generates:
        raise ValidationError("max_tokens: Field required", "max_tokens")
    messages = [*_system(fields), *_messages(fields)]
    config = fields.child("output_config")
    tier = fields.text("service_tier")
    if tier not in (None, "auto", "standard_only"):
        raise ValidationError("`service_tier` must be auto or standard_only", "service_tier")
    temperature = fields.number("temperature")
    if temperature is not None and not 0 <= temperature <= 1:
        raise ValidationError("`temperature` must be >= 0 and <= 1", "temperature")
    chat: dict[str, Any] = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stop": fields.texts("stop_sequences") or None,
        "continue_final_message": messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        "reasoning_effort": config.text("effort"),
        "response_format": _format(config),
        "user": fields.child("metadata").text("user_id"),
        "chat_template_kwargs": _thinking(fields),
        **_tools(fields),
    }
    fields.expect("cache_control", "stream_options")
    ignored = pass_others(fields, chat)
    return Translated(chat, {}, ignored)


def applied_thinking(ignored: Sequence[str]) -> list[str]:
    """Ignored fields in the words of this API: `thinking` only where the chat template reads none of its variables."""
    unread = [f"chat_template_kwargs.{name}" for name in _THINKING]
    rest = [name for name in ignored if name not in unread]
    return [*rest, "thinking"] if all(name in ignored for name in unread) else rest


def _system(fields: Fields) -> list[dict[str, Any]]:
    system = fields.take("system")
    if not system:
        return []
    return [{"role": "system", "content": _text(fields, system, "system")}]


def _messages(fields: Fields) -> list[dict[str, Any]]:
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        raise ValidationError("messages: at least one message is required", "messages")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        where = f"messages[{index}]"
        message = fields.nested(where, object_of(item, where))
        role, content = message.take("role"), message.take("content")
        if role not in ("user", "assistant"):
            raise ValidationError(f"`{where}.role` must be user or assistant", "messages")
        add = _add_assistant if role == "assistant" else _add_user
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        add(messages, message, items_of(blocks, f"{where}.content"), where)
    return messages


def _blocks(message: Fields, blocks: list[Any], where: str) -> list[tuple[Any, Fields, str]]:
    """(type, block, place) of each."""
    found = []
    for index, value in enumerate(blocks):
        at = f"{where}.content[{index}]"
        block = message.nested(f"content[{index}]", object_of(value, at))
        block.expect("cache_control", "citations")
        found.append((block.take("type"), block, at))
    return found


def _add_user(messages: list[dict[str, Any]], message: Fields, blocks: list[Any], where: str) -> None:
    """Results of tools are messages of their own, in the order of the blocks."""
    texts: list[str] = []
    for kind, block, at in _blocks(message, blocks, where):
        if kind == "text":
            texts.append(text_of(block.take("text"), f"{at}.text"))
        elif kind == "tool_result":
            _flush(messages, texts)
            content = block.take("content")
            text = "" if content is None else _text(block, content, f"{at}.content")
            block.expect("is_error")
            call_id = text_of(block.take("tool_use_id"), f"{at}.tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise _unsupported(kind, at)
    if texts or not blocks:
        messages.append({"role": "user", "content": "".join(texts)})


def _flush(messages: list[dict[str, Any]], texts: list[str]) -> None:
    if texts:
        messages.append({"role": "user", "content": "".join(texts)})
        texts.clear()


def _add_assistant(messages: list[dict[str, Any]], message: Fields, blocks: list[Any], where: str) -> None:
    texts, reasoning, calls = list[str](), list[str](), list[dict[str, Any]]()
    for kind, block, at in _blocks(message, blocks, where):
        if kind == "text":
            texts.append(text_of(block.take("text"), f"{at}.text"))
        elif kind == "thinking":
            block.expect("signature")
            reasoning.append(text_of(block.take("thinking"), f"{at}.thinking"))
        elif kind == "tool_use":
            block.expect("caller")
            arguments = orjson.dumps(object_of(block.take("input"), f"{at}.input")).decode()
            function = {"name": text_of(block.take("name"), f"{at}.name"), "arguments": arguments}
            calls.append({"id": text_of(block.take("id"), f"{at}.id"), "type": "function", "function": function})
        else:
            raise _unsupported(kind, at)
    whole: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    whole |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
    messages.append(whole | ({"tool_calls": calls} if calls else {}))


def _text(fields: Fields, content: Any, where: str) -> str:
    """A text, or blocks of text."""
    if isinstance(content, str):
        return content
    texts = []
    for index, value in enumerate(items_of(content, where)):
        at = f"{where}[{index}]"
        block = fields.nested(f"{where.rpartition('.')[2]}[{index}]", object_of(value, at))
        block.expect("cache_control", "citations")
        kind = block.take("type")
        if kind != "text":
            raise _unsupported(kind, at)
        texts.append(text_of(block.take("text"), f"{at}.text"))
    return "".join(texts)


def _unsupported(kind: Any, where: str) -> UnsupportedField:
    return UnsupportedField(f"{where}.{str(kind)[:32]}", "is not supported: this model reads text alone")


def _format(config: Fields) -> dict[str, Any] | None:
    """Structured output as `response_format`."""
    if config.mapping("format") is None:
        return None
    given = config.child("format")
    if given.take("type") != "json_schema":
        raise ValidationError("`output_config.format.type` must be json_schema", "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.take("schema"), "strict": True}}


def _thinking(fields: Fields) -> dict[str, Any] | None:
    """Variables of the chat template. A budget and how reasoning is shown have no effect."""
    thinking = fields.child("thinking")
    kind = thinking.text("type")
    if kind is None:
        return None
    if kind not in ("enabled", "adaptive", "disabled"):
        raise UnsupportedField("thinking.type", "must be enabled, adaptive or disabled")
    return dict.fromkeys(_THINKING, kind != "disabled")


def _tools(fields: Fields) -> dict[str, Any]:
    """`tools` and `tool_choice` in the form of chat completions."""
    chat: dict[str, Any] = {}
    tools, choice = fields.take("tools"), fields.child("tool_choice")
    if tools is not None:
        chat["tools"] = [_tool(fields, each, f"tools[{index}]") for index, each in enumerate(items_of(tools, "tools"))]
    kind, name = choice.text("type"), choice.text("name")
    if choice.flag("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if kind not in (None, "auto", "any", "tool", "none"):
        raise ValidationError("`tool_choice.type` must be auto, any, tool or none", "tool_choice")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind is not None:
        chat["tool_choice"] = {"any": "required"}.get(kind, kind)
    return chat


def _tool(fields: Fields, value: Any, where: str) -> dict[str, Any]:
    tool = fields.nested(where, object_of(value, where))
    kind = tool.take("type")
    if kind not in (None, "custom"):
        raise UnsupportedField(f"{where}.{str(kind)[:32]}", _SERVERS)
    tool.expect("cache_control", "eager_input_streaming")
    given = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    function = {own: found for name, own in given.items() if (found := tool.take(name)) is not None}
    return {"type": "function", "function": function}
