"""The body of OpenAI's `/v1/responses`, as far as it needs no stored state."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.chat import read_arguments
from lorikeet.router.schemas.model import (
    Body,
    DialectBody,
    Missing,
    Rejected,
    Rule,
    Texts,
    Translated,
    UnknownKind,
    fail_fast,
    present,
    published_as,
    text_only,
)

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Fields of chat completions, and what they are called here."""
_NO_STORAGE = "is not supported by this server, which stores no responses: send the whole conversation as `input`"
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = frozenset(("input_text", "output_text", "text"))
_REASONING = frozenset(("summary_text", "reasoning_text"))
_Any = Annotated[Any, published_as(Any)]
_Text = Annotated[Any, published_as(str)]
_INPUT_RULE = "must be a text or a list of at least one item"


class InputPart(Body):
    """A text."""

    type: _Text = None
    text: str = ""
    annotations: _Any = None
    logprobs: _Any = None


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Content = Annotated[list[InputPart], fail_fast, BeforeValidator(_parts, json_schema_input_type=str | list[InputPart])]


def _joined(parts: list[InputPart], where: str, kinds: frozenset[str] = _TEXTS) -> str:
    for index, part in enumerate(parts):
        if part.type not in kinds:
            raise text_only(f"{where}[{index}]", part.type)
    return "".join(part.text for part in parts)


class _Item(Body):
    id: _Any = None
    status: _Any = None
    phase: _Any = None


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: str
    content: _Content

    def add_to(self, messages: list[dict[str, Any]], where: str) -> None:
        """The text that follows reasoning of the assistant is of the same message."""
        content = _joined(self.content, f"{where}.content")
        last = _last_of_assistant(messages)
        if self.role == "assistant" and last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = content
        else:
            messages.append({"role": self.role, "content": content})


class FunctionCallItem(_Item):
    """A call of the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: _Text = None

    def add_to(self, messages: list[dict[str, Any]], where: str) -> None:
        """A call is of the same message as what the assistant wrote before it."""
        if (last := _last_of_assistant(messages)) is None:
            messages.append(last := {"role": "assistant", "content": ""})
        function = {"name": self.name, "arguments": read_arguments(self.arguments, f"{where}.arguments")}
        last.setdefault("tool_calls", []).append({"id": self.call_id, "type": "function", "function": function})


class FunctionResultItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Content

    def add_to(self, messages: list[dict[str, Any]], where: str) -> None:
        """A result is a message."""
        content = _joined(self.output, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": content})


class ReasoningItem(_Item):
    """Reasoning of the assistant."""

    type: Literal["reasoning"]
    content: _Content | None = None
    summary: _Content = Field(default_factory=list)
    encrypted_content: _Text = None

    def add_to(self, messages: list[dict[str, Any]], where: str) -> None:
        """Reasoning begins a message."""
        name, parts = ("summary", self.summary) if self.content is None else ("content", self.content)
        reasoning = _joined(parts, f"{where}.{name}", _REASONING)
        messages.append({"role": "assistant", "content": "", **({"reasoning_content": reasoning} if reasoning else {})})


class ReferenceItem(_Item):
    """An item that is stored, which nothing is here."""

    type: Literal["item_reference"]

    def add_to(self, messages: list[dict[str, Any]], where: str) -> None:
        """Raises UnsupportedField."""
        raise UnsupportedField(f"{where}.item_reference", _NO_STORAGE)


def _last_of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _kind(item: Any) -> str | None:
    if not isinstance(item, dict):
        return "message"  # whose error says that it must be an object
    kind = item.get("type")
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_kind),
]


class TextFormat(Body):
    """What the output follows."""

    type: _Text = Field(None, description="text, json_object or json_schema")
    name: _Text = None
    description: _Text = None
    schema_: Annotated[Any, published_as(dict[str, Any])] = Field(None, alias="schema")
    strict: Annotated[Any, published_as(bool)] = None

    def response_format(self) -> dict[str, Any]:
        """In the form of chat completions, which check the values."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = present(name=self.name, description=self.description, schema=self.schema_, strict=self.strict)
        return {"type": self.type, "json_schema": schema}


class TextOptions(Body):
    """How the output is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """How the model reasons. A summary is not made."""

    effort: str | None = None


class StreamFields(Body):
    """OpenAI's options of streams, none of which is applied."""


class ResponsesTool(Body):
    """A function that the output may call."""

    type: _Text = Field(None, description="function")
    name: _Text = None
    description: _Text = None
    parameters: Annotated[Any, published_as(dict[str, Any])] = None
    strict: Annotated[Any, published_as(bool)] = None

    def function(self, where: str) -> dict[str, Any]:
        """In the form of chat completions, which check the values."""
        if self.type != "function":
            kind = str(self.type)[:32]
            raise UnsupportedField(f"{where}.{kind}", "is not supported: this server has no tools of its own")
        function = present(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)
        return {"type": "function", "function": function}


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(DialectBody):
    """Further fields are those of chat completions."""

    names: ClassVar = {
        **NAMES,
        "max_completion_tokens": "max_output_tokens",
        "logprobs": "include",
        "functions": "tools",
    }

    input: Annotated[
        list[InputItem],
        fail_fast,
        BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
        Rule(_INPUT_RULE),
        Missing(f"`input` {_INPUT_RULE}"),
        UnknownKind("is not supported: this server has no such tools"),
    ] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Annotated[Any, published_as(int)] = None
    store: Annotated[Any, published_as(bool)] = Field(None, description="Nothing is stored: answers have false")
    tools: Annotated[list[ResponsesTool], fail_fast] | None = None
    tool_choice: Annotated[Any, published_as(str | dict[str, Any])] = Field(
        None, description="auto, none, required, a function, or `allowed_tools`"
    )
    text: TextOptions = Field(default_factory=lambda: TextOptions.read({}))
    reasoning: Reasoning = Field(default_factory=lambda: Reasoning.read({}))
    include: Texts = Field(default_factory=list, description=_LOGPROBS)
    top_logprobs: Annotated[Any, published_as(int)] = None
    stream_options: StreamFields | None = None
    previous_response_id = conversation = prompt = Rejected(_NO_STORAGE)
    background = Rejected("is not supported by this server, which stores no responses", (False,))
    truncation = Rejected("must be disabled: use `truncate_prompt_tokens`", ("disabled",))
    n = Rejected("is not a field of this route: send several requests", (1,))

    def translated(self, body: dict[str, Any]) -> Translated:
        """`body` is this one as it was sent, of which the answer repeats parts. Raises ValidationError."""
        self.check_supported()
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        for index, item in enumerate(self.input):
            item.add_to(messages, f"input[{index}]")
        text_format = self.text.format
        chat: dict[str, Any] = {
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "response_format": None if text_format is None else text_format.response_format(),
            "verbosity": self.text.verbosity,
            "reasoning_effort": self.reasoning.effort,
            "tool_choice": _tool_choice(self.tool_choice),
        }
        if self.tools is not None:
            chat["tools"] = [tool.function(f"tools[{index}]") for index, tool in enumerate(self.tools)]
        if _LOGPROBS in self.include or self.top_logprobs:  # what else `include` may ask for, answers never have
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return Translated(self.with_others(chat), _shown(body, self.text.verbosity), self.nested_ignored())


def _tool_choice(choice: Any) -> Any:
    """`tool_choice` in the form of chat completions, which check what is inside."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind != "allowed_tools":
        raise UnsupportedField("tool_choice", "must be none, auto, required, a function or allowed_tools")
    tools = choice.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValidationError("`tool_choice.tools` must be a list of objects", "tool_choice.tools")
    listed = [{"type": "function", "function": {"name": tool.get("name")}} for tool in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}


def _shown(body: dict[str, Any], verbosity: str | None) -> dict[str, Any]:
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
        "text": {"format": given("text", {}).get("format") or {"type": "text"}, "verbosity": verbosity},
        "tool_choice": given("tool_choice", "auto"),
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in given("tools", [])],
        "top_logprobs": given("top_logprobs", 0),
        "top_p": given("top_p", 1.0),
        "truncation": "disabled",
        "user": given("user"),
    }
