"""The bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field

from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.model import (
    F32,
    TEXT_ONLY,
    U32,
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
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "user": "metadata",
    "parallel_tool_calls": "tool_choice",
    "chat_template_kwargs": "thinking",
}
"""Fields of chat completions, and what they are called here."""
_SERVERS = "is not supported by this server, which has no tools or containers of its own"
_THINKING = ("enable_thinking", "thinking")
"""Variables of chat templates by which models turn reasoning on and off."""
_NO_MESSAGES = "messages: at least one message is required"
_Object = Annotated[Any, published_as(dict[str, Any])]


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: _Object = None
    citations: _Object = None


class ThinkingBlock(Body):
    """Reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Any, published_as(str)] = None


class ToolUseBlock(Body):
    """A call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: _Object = None
    cache_control: _Object = None


def _blocks(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


_Texts = Annotated[
    list[Annotated[TextBlock | ThinkingBlock, Field(discriminator="type")]],
    fail_fast,
    BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock]),
    UnknownKind(TEXT_ONLY),
]


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts = Field(default_factory=list)
    is_error: Annotated[Any, published_as(bool)] = None
    cache_control: _Object = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class MessageParameter(Body):
    """A message."""

    role: Literal["user", "assistant"]
    content: Annotated[
        list[Block],
        fail_fast,
        BeforeValidator(_blocks, json_schema_input_type=str | list[Block]),
        UnknownKind(TEXT_ONLY),
    ]

    def messages(self, where: str) -> list[dict[str, Any]]:
        """The messages of a chat: results of tools are messages of their own, in the order of the blocks."""
        if self.role == "assistant":
            return [self._assistant(where)]
        messages, texts = list[dict[str, Any]](), list[str]()
        for index, block in enumerate(self.content):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                _flush(messages, texts)
                text = _joined(block.content, f"{where}.content[{index}].content")
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            else:
                raise text_only(f"{where}.content[{index}]", block.type)
        if texts or not self.content:
            messages.append({"role": "user", "content": "".join(texts)})
        return messages

    def _assistant(self, where: str) -> dict[str, Any]:
        texts, reasoning, calls = list[str](), list[str](), list[dict[str, Any]]()
        for index, block in enumerate(self.content):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                reasoning.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            else:
                raise text_only(f"{where}.content[{index}]", block.type)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        message |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
        return message | ({"tool_calls": calls} if calls else {})


def _flush(messages: list[dict[str, Any]], texts: list[str]) -> None:
    if texts:
        messages.append({"role": "user", "content": "".join(texts)})
        texts.clear()


def _joined(blocks: Sequence[TextBlock | ThinkingBlock], where: str) -> str:
    for index, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise text_only(f"{where}[{index}]", block.type)
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


class OutputFormat(Body):
    """The schema of an output."""

    type: Annotated[Any, published_as(Literal["json_schema"])] = None
    schema_: Annotated[Any, published_as(dict[str, Any])] = Field(None, alias="schema")


class OutputConfig(Body):
    """How the output is written."""

    effort: str | None = Field(None, description="For chat templates that read it")
    format: OutputFormat | None = None

    def response_format(self) -> dict[str, Any] | None:
        """Raises ValidationError."""
        if self.format is None:
            return None
        if self.format.type != "json_schema":
            raise ValidationError("`output_config.format.type` must be json_schema", "output_config.format")
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": self.format.schema_, "strict": True}}


class Thinking(Body):
    """Whether the model reasons. A budget and how reasoning is shown have no effect."""

    type: str | None = Field(None, description="enabled, adaptive or disabled")

    def variables(self) -> dict[str, Any] | None:
        """Variables of the chat template. Raises UnsupportedField."""
        if self.type not in (None, "enabled", "adaptive", "disabled"):
            raise UnsupportedField("thinking.type", "must be enabled, adaptive or disabled")
        return None if self.type is None else dict.fromkeys(_THINKING, self.type != "disabled")


class AnthropicTool(Body):
    """A function that the output may call."""

    type: Annotated[Any, published_as(str)] = Field(None, description="custom")
    name: Annotated[Any, published_as(str)] = None
    description: Annotated[Any, published_as(str)] = None
    input_schema: _Object = None
    strict: Annotated[Any, published_as(bool)] = None
    cache_control: _Object = None
    eager_input_streaming: Annotated[Any, published_as(bool)] = None

    def function(self, where: str) -> dict[str, Any]:
        """In the form of chat completions, which check the values."""
        if self.type not in (None, "custom"):
            raise UnsupportedField(f"{where}.{str(self.type)[:32]}", _SERVERS)
        function = present(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return {"type": "function", "function": function}


class AnthropicToolChoice(Body):
    """Which functions the output may call."""

    type: str | None = None
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def fields(self) -> dict[str, Any]:
        """`tool_choice` and `parallel_tool_calls` of chat completions. Raises ValidationError."""
        if self.type not in (None, "auto", "any", "tool", "none"):
            raise ValidationError("`tool_choice.type` must be auto, any, tool or none", "tool_choice")
        chat: dict[str, Any] = {"parallel_tool_calls": False} if self.disable_parallel_tool_use else {}
        if self.type == "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": self.name}}
        elif self.type is not None:
            chat["tool_choice"] = {"any": "required"}.get(self.type, self.type)
        return chat


class Metadata(Body):
    """Who the request is for."""

    user_id: str | None = None


class CountTokensRequest(DialectBody):
    """Further fields are those of chat completions."""

    names: ClassVar = {**NAMES, "max_completion_tokens": "max_tokens", "functions": "tools"}

    max_tokens: U32 | None = None
    messages: Annotated[list[MessageParameter], fail_fast, Missing(_NO_MESSAGES)] = Field(
        description="One of the assistant at the end is continued"
    )
    system: _Texts = Field(default_factory=list)
    output_config: OutputConfig = Field(default_factory=lambda: OutputConfig.read({}))
    service_tier: Literal["auto", "standard_only"] | None = None
    temperature: Annotated[F32, Rule("must be >= 0 and <= 1")] = Field(1.0, ge=0.0, le=1.0)
    stop_sequences: Texts = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=lambda: Metadata.read({}))
    thinking: Thinking = Field(
        default_factory=lambda: Thinking.read({}),
        description="For chat templates that read `enable_thinking` or `thinking`",
    )
    tools: Annotated[list[AnthropicTool], fail_fast] | None = None
    tool_choice: AnthropicToolChoice = Field(default_factory=lambda: AnthropicToolChoice.read({}))
    cache_control: _Object = None
    stream_options: _Object = None
    container = mcp_servers = context_management = Rejected(_SERVERS, ("", [], {}, False, 0))
    n = Rejected("is not a field of this route: send several requests", (1,))

    def translated(self) -> Translated:
        """Raises ValidationError."""
        self.check_supported()
        if not self.messages:
            raise ValidationError(_NO_MESSAGES, "messages")
        system = [{"role": "system", "content": _joined(self.system, "system")}] if self.system else []
        turns = [message.messages(f"messages[{index}]") for index, message in enumerate(self.messages)]
        messages = [*system, *(message for turn in turns for message in turn)]
        last = messages[-1]
        chat: dict[str, Any] = {
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature if "temperature" in self.model_fields_set else None,
            "stop": self.stop_sequences or None,
            "continue_final_message": last["role"] == "assistant" and "tool_calls" not in last,
            "reasoning_effort": self.output_config.effort,
            "response_format": self.output_config.response_format(),
            "user": self.metadata.user_id,
            "chat_template_kwargs": self.thinking.variables(),
            **self.tool_choice.fields(),
        }
        if self.tools is not None:
            chat["tools"] = [tool.function(f"tools[{index}]") for index, tool in enumerate(self.tools)]
        return Translated(self.with_others(chat), ignored=self.nested_ignored())


class MessagesRequest(CountTokensRequest):
    """Further fields are those of chat completions."""

    max_tokens: Annotated[U32, Missing("max_tokens: Field required")]
    stream: bool = False

    def translated(self) -> Translated:
        """Raises ValidationError."""
        translated = super().translated()
        translated.chat["stream"] = self.stream
        return translated


def applied_thinking(ignored: Sequence[str]) -> list[str]:
    """Ignored fields in the words of this API: `thinking` only if the chat template reads none of its variables."""
    unread = [f"chat_template_kwargs.{name}" for name in _THINKING]
    rest = [name for name in ignored if name not in unread]
    return [*rest, "thinking"] if all(name in ignored for name in unread) else rest
