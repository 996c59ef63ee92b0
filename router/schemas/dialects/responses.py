"""Reader of the body of OpenAI's `/v1/responses`, as far as it needs no stored state."""

from typing import Any

from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.chat.messages import read_arguments
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
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Fields of chat completions, and what they are called here."""
_OTHERS = {
    **NAMES,
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "include",
    "functions": "tools",
}
_NO_STORAGE = "is not supported by this server, which stores no responses: send the whole conversation as `input`"
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = frozenset(("input_text", "output_text", "text"))
_REASONING = frozenset(("summary_text", "reasoning_text"))


def translate(body: dict[str, Any]) -> Translated:
    """Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    refuse_others(fields, _OTHERS)
    for name in ("previous_response_id", "conversation", "prompt"):
        if fields.take(name) is not None:
            raise UnsupportedField(name, _NO_STORAGE)
    if fields.take("n") not in (None, 1):
        raise UnsupportedField("n", "is not a field of this route: send several requests")
    if fields.flag("background"):
        raise UnsupportedField("background", "is not supported by this server, which stores no responses")
    truncation = fields.text("truncation")
    if truncation not in (None, "disabled"):
        raise UnsupportedField("truncation", "must be disabled: use `truncate_prompt_tokens`")
    fields.expect("store", "include", "reasoning", "text", "tools", "tool_choice")
    instructions = fields.text("instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    messages += _messages(fields, fields.take("input"))
    text, effort = _text(fields), _reasoning(fields)
    chat: dict[str, Any] = {
        "messages": messages,
        "max_tokens": fields.take("max_output_tokens"),
        "response_format": text["format"],
        "verbosity": text["verbosity"],
        "reasoning_effort": effort,
        **_tools(fields),
        **_logprobs(fields),
    }
    options = fields.mapping("stream_options")
    if options is not None:
        fields.nested("stream_options", options)
    ignored = pass_others(fields, chat)
    return Translated(chat, _shown(body, text), ignored)


def _shown(body: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's object of a response repeats, with defaults."""

    def given(name: str, default: Any = None) -> Any:
        return default if body.get(name) is None else body[name]

    reasoning = given("reasoning", {})
    return {
        "background": False,
        "instructions": given("instructions"),
        "max_output_tokens": given("max_output_tokens"),
        "max_tool_calls": given("max_tool_calls"),
        "metadata": given("metadata", {}),
        "parallel_tool_calls": given("parallel_tool_calls", True),
        "previous_response_id": None,
        "prompt_cache_key": given("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": given("safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": given("temperature", 1.0),
        "text": {
            "format": {"type": "text"} if text["given"] is None else text["given"],
            "verbosity": text["verbosity"],
        },
        "tool_choice": given("tool_choice", "auto"),
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in given("tools", [])],
        "top_logprobs": given("top_logprobs", 0),
        "top_p": given("top_p", 1.0),
        "truncation": "disabled",
        "user": given("user"),
    }


def _messages(fields: Fields, value: Any) -> list[dict[str, Any]]:
    """The messages of `input`. Reasoning, text and calls of an assistant that follow one another are one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValidationError("`input` must be a text or a list of at least one item", "input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        where = f"input[{index}]"
        _add(messages, fields.nested(where, object_of(item, where)), where)
    return messages


def _add(messages: list[dict[str, Any]], item: Fields, where: str) -> None:
    """Add one item of `input`."""
    item.expect("id", "status", "phase")
    kind = item.take("type")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call":
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        arguments = read_arguments(item.take("arguments"), f"{where}.arguments")
        function = {"name": text_of(item.take("name"), f"{where}.name"), "arguments": arguments}
        last.setdefault("tool_calls", []).append(
            {"id": text_of(item.take("call_id"), f"{where}.call_id"), "type": "function", "function": function}
        )
    elif kind == "function_call_output":
        content = _content(item, item.take("output"), f"{where}.output", _TEXTS)
        call_id = text_of(item.take("call_id"), f"{where}.call_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "reasoning":
        item.expect("encrypted_content")
        name = "content" if item.has("content") else "summary"
        item.expect("content", "summary")
        reasoning = _content(item, item.take(name) or [], f"{where}.{name}", _REASONING)
        messages.append({"role": "assistant", "content": "", **({"reasoning_content": reasoning} if reasoning else {})})
    elif kind in (None, "message"):
        role = text_of(item.take("role"), f"{where}.role")
        content = _content(item, item.take("content"), f"{where}.content", _TEXTS)
        if role == "assistant" and last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "item_reference":
        raise UnsupportedField(f"{where}.item_reference", _NO_STORAGE)
    else:
        raise UnsupportedField(f"{where}.{str(kind)[:32]}", "is not supported: this server has no such tools")


def _content(item: Fields, content: Any, where: str, kinds: frozenset[str]) -> str:
    """The text of an item, with its parts joined."""
    if isinstance(content, str):
        return content
    texts = []
    for index, value in enumerate(items_of(content, where)):
        at = f"{where}[{index}]"
        part = item.nested(f"{where.rpartition('.')[2]}[{index}]", object_of(value, at))
        kind = part.take("type")
        if kind not in kinds:
            raise UnsupportedField(f"{at}.{str(kind)[:32]}", "is not supported: this model reads text alone")
        part.expect("annotations", "logprobs")
        texts.append(text_of(part.take("text"), f"{at}.text"))
    return "".join(texts)


def _text(fields: Fields) -> dict[str, Any]:
    """`format` as `response_format`, the format as it was `given`, and `verbosity`."""
    text = fields.child("text")
    given, verbosity = text.mapping("format"), text.text("verbosity")
    if given is None:
        return {"format": None, "given": None, "verbosity": verbosity}
    shape = text.nested("format", given)
    kind = shape.take("type")
    if kind != "json_schema":
        return {"format": {"type": kind}, "given": given, "verbosity": verbosity}
    inner = {name: shape.take(name) for name in ("name", "description", "schema", "strict")}
    inner = {name: value for name, value in inner.items() if value is not None}
    return {"format": {"type": kind, "json_schema": inner}, "given": given, "verbosity": verbosity}


def _reasoning(fields: Fields) -> str | None:
    """The effort. A summary is not made."""
    reasoning = fields.child("reasoning")
    return reasoning.text("effort")


def _tools(fields: Fields) -> dict[str, Any]:
    """`tools` and `tool_choice` in the form of chat completions."""
    tools = fields.take("tools")
    chat: dict[str, Any] = {"tool_choice": _tool_choice(fields)}
    if tools is None:
        return chat
    chat["tools"] = []
    for index, value in enumerate(items_of(tools, "tools")):
        where = f"tools[{index}]"
        tool = fields.nested(where, object_of(value, where))
        kind = tool.take("type")
        if kind != "function":
            raise UnsupportedField(f"{where}.{str(kind)[:32]}", "is not supported: this server has no tools of its own")
        names = ("name", "description", "parameters", "strict")
        function = {name: found for name in names if (found := tool.take(name)) is not None}
        chat["tools"].append({"type": "function", "function": function})
    return chat


def _tool_choice(fields: Fields) -> Any:
    choice = fields.take("tool_choice")
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        listed = [_tool_choice_of(each) for each in items_of(choice.get("tools"), "tool_choice.tools")]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}
    raise UnsupportedField("tool_choice", "must be none, auto, required, a function or allowed_tools")


def _tool_choice_of(tool: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": object_of(tool, "tool_choice.tools").get("name")}}


def _logprobs(fields: Fields) -> dict[str, Any]:
    """`include` asks for log probabilities; what else it may ask for, answers never have."""
    include, top = fields.texts("include"), fields.take("top_logprobs")
    if _LOGPROBS not in include and not top:
        return {}
    return {"logprobs": True, "top_logprobs": top}
