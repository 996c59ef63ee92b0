"""The messages and tools of a chat, as OpenAI's bodies have them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn

import orjson
from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ToolError, UnsupportedField, ValidationError
from lorikeet.router.schemas.grammar import GrammarFields, check_grammar, check_letters
from lorikeet.router.schemas.model import Body, Missing, Rejected, Rule, fail_fast, published_as
from lorikeet.router.text.chat_template import TemplateOptions

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
        calls = [
            json.dumps(message["tool_calls"], ensure_ascii=False)
            for message in self.messages
            if "tool_calls" in message
        ]
        return [*(message["content"] for message in self.messages), *calls]

    @property
    def documents(self) -> list[str]:
        """The documents as JSON, whose length is about that of what a template shows of them."""
        return [orjson.dumps(document).decode() for document in self.options.variables.get("documents", ())]

    def ignored(self, unread: Iterable[str]) -> list[str]:
        """The fields of variables that the template does not read.

        Raises UnsupportedField for one that would change every other template's prompt.
        """
        fields = [self.named[name] for name in unread if name in self.named]
        for name in ("documents", "add_generation_prompt"):
            if name in fields:
                raise UnsupportedField(name, "is not read by the chat template of this model or adapter")
        return fields


class CalledFunction(Body):
    """A function that an assistant called."""

    name: str
    arguments: Annotated[Any, published_as(str)] = Field(None, description="The text of a JSON object")


class ToolCall(Body):
    """A call that an assistant made."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _check_shape(cls, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
            raise PydanticCustomError("tool_call", "Input should be an object with a `function`")
        if not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str | None):
            raise PydanticCustomError("tool_call", "Input should have an `id` and a `function.name`, both strings")
        return call


class ContentPart(Body):
    """A part of a message's text."""

    type: Annotated[Any, published_as(str)] = Field(None, description="text")
    text: Annotated[Any, published_as(str)] = None

    def text_at(self, where: str) -> str:
        """The text of the part, which is at `where` in the body. Raises ValidationError or UnsupportedField."""
        if self.type == "text" and isinstance(self.text, str):
            return self.text
        if isinstance(self.type, str) and self.type != "text":
            raise UnsupportedField(f"{where}.{self.type[:32]}", "is not supported: this model reads text alone")
        raise ValidationError(f"`{where}` must be a part with `type` and `text`", where.rpartition("[")[0])


_OLDER = "is OpenAI's older form, which this server does not support: use `tools` and `tool_choice`"
_ONLY_OF = {"reasoning_content": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}
"""Roles of messages that have a field."""


class ChatMessage(Body):
    """A message of a conversation."""

    role: str
    content: str | Annotated[list[ContentPart], fail_fast] = ""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], fail_fast] = Field(default_factory=list, description="Of the role assistant")
    tool_call_id: str | None = Field(None, description="Of the role tool")
    reasoning_content: str | None = Field(None, description="Of the role assistant, for chat templates that show it")
    function_call = Rejected(_OLDER)
    audio = Rejected()
    refusal = Rejected("is not supported by this server: put the text into `content`", ("",))
    reasoning = Rejected("is not supported by this server: use `reasoning_content`", ("",))
    prefix = Rejected("is not supported by this server: use `continue_final_message`", (False,))

    @model_validator(mode="before")
    @classmethod
    def _check_role(cls, message: Any) -> Any:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PydanticCustomError("message", "Input should be an object with a `role`")
        return message

    def ignored(self, path: str = "") -> list[str]:
        """Also the fields that messages of this role do not have."""
        names = super().ignored(path)
        others = [name for name, role in _ONLY_OF.items() if role != self.role and name in self.model_fields_set]
        return [*names, *(path + name for name in others)] if others else names

    def shown(self, where: str) -> dict[str, Any]:
        """The message as chat templates take it; `where` is its place in the body. Raises ValidationError."""
        content = self.content
        if not isinstance(content, str):
            parts = enumerate(content)
            content = "".join([part.text_at(f"{where}.content[{index}]") for index, part in parts])
        # OpenAI's newer name of the role; chat templates have only the older one.
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.role == "assistant":
            if self.reasoning_content is not None:
                message["reasoning_content"] = self.reasoning_content
            if self.tool_calls:
                message["tool_calls"] = [
                    _called(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(self.tool_calls)
                ]
        elif self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        self.check_supported(f"{where}.")
        return message


def _called(call: ToolCall, where: str) -> dict[str, Any]:
    """A call with its arguments as templates expect them: as an object, where they are one."""
    arguments = read_arguments(call.function.arguments, f"{where}.function.arguments")
    return {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": arguments}}


def _check_num_items(value: Any, info: ValidationInfo) -> Any:
    """Before any element is looked at, since a list may be as long as the body."""
    config, name = info.context, info.field_name
    if config is not None and isinstance(value, list) and len(value) > config.max_input_length:
        most = config.max_input_length
        raise ValidationError(f"`{name}` supports up to {most} {name}. Given: {len(value)}", name)
    return value


class ConversationGroup(Body):
    """The messages of a conversation, and what else its chat template gets."""

    messages: Annotated[
        list[ChatMessage],
        fail_fast,
        BeforeValidator(_check_num_items),
        Rule("must be a list of at least one message"),
        Missing("`{name}` must be a list of at least one message"),
    ] = Field(min_length=1)
    add_generation_prompt: bool | None = Field(None, description="Default true; false needs a template that reads it")
    continue_final_message: bool = Field(
        False, description="The output continues the final message; not together with `add_generation_prompt` true"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template; those that it does not read are ignored and named",
    )
    chat_template: str | None = Field(None, description="With `--trust-request-chat-template`, else rejected (422)")
    documents: Annotated[Any, published_as(list[dict[str, Any]])] = Field(
        None, description="Rejected (422) if the chat template does not read them"
    )
    reasoning_effort: str | None = Field(None, description="Ignored and named if the chat template does not read it")
    verbosity: str | None = Field(None, description="Ignored and named if the chat template does not read it")

    def conversation(self, config: RouterConfig) -> Conversation:
        """What is rendered as the prompt. Raises ValidationError."""
        messages = [message.shown(f"messages[{index}]") for index, message in enumerate(self.messages)]
        _name_results(messages)
        source = self._own_template(config)
        variables = self._template_kwargs()
        named = {name: f"chat_template_kwargs.{name}" for name in variables}
        for name, value in (("reasoning_effort", self.reasoning_effort), ("verbosity", self.verbosity)):
            if value is not None:
                variables[name], named[name] = value, name
        documents = self._checked_documents(config)
        if documents:
            variables["documents"], named["documents"] = documents, "documents"
        wants_prompt, continues = self.add_generation_prompt, self.continue_final_message
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

    def _own_template(self, config: RouterConfig) -> str | None:
        source = self.chat_template
        if not source:
            return None
        if not config.trust_request_chat_template:
            raise UnsupportedField("chat_template", "is accepted only with the flag --trust-request-chat-template")
        if len(source) > MAX_TEMPLATE_BYTES:
            raise ValidationError(f"`chat_template` must have at most {MAX_TEMPLATE_BYTES} characters", "chat_template")
        return source

    def _template_kwargs(self) -> dict[str, Any]:
        variables = dict(self.chat_template_kwargs)
        for name in _OWN_FIELDS:
            if name in variables:
                path = f"chat_template_kwargs.{name}"
                sentence = f"`{path}` is not allowed: `{name}` is not a variable of the template alone"
                raise ValidationError(sentence, path)
        if variables and len(orjson.dumps(variables)) > MAX_TEMPLATE_KWARGS_BYTES:
            raise ValidationError(
                f"`chat_template_kwargs` must be at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON",
                "chat_template_kwargs",
            )
        return variables

    def _checked_documents(self, config: RouterConfig) -> list[Any]:
        documents, most = self.documents, config.max_input_length
        if documents is None:
            return []
        if isinstance(documents, list) and len(documents) > most:
            raise ValidationError(f"`documents` supports up to {most} documents. Given: {len(documents)}", "documents")
        if not isinstance(documents, list) or not all(isinstance(item, dict) for item in documents):
            raise ValidationError("`documents` must be a list of objects", "documents")
        return documents


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Results of tools get the name of the function that was called, which some templates show instead of the id."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


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


MAX_TOOLS = 128
MAX_TOOL_PROMPT = 16 << 10
_NAME_RULE = "must be 1 to 64 letters, digits or any of _.-"
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Function:
    """A function that the output may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """The schema of its arguments."""
    is_strict: bool
    """Whether the arguments must match the schema."""


@dataclass(frozen=True)
class ToolFields:
    """The tools of a request."""

    tools: tuple[dict[str, Any], ...] = ()
    """The tools as chat templates take them."""
    functions: tuple[Function, ...] = ()
    """The functions of `tools`, parsed."""
    is_required: bool = False
    """Whether the output must be a call."""
    allowed_names: frozenset[str] = frozenset()
    """Names of the functions that may be called."""
    parallel: bool = True
    """Whether the output may have several calls."""
    prompt: str | None = field(default=None, repr=False)
    """LoRAX's `tool_prompt`, which selects its form of tools."""

    @property
    def allowed(self) -> tuple[Function, ...]:
        """The functions that may be called."""
        return tuple(function for function in self.functions if function.name in self.allowed_names)

    @property
    def is_strict(self) -> bool:
        """Whether one of them is strict."""
        return any(function.is_strict for function in self.allowed)


NO_TOOLS = ToolFields()


class ToolFunction(Body):
    """A function that the output may call."""

    name: Annotated[str, Rule(_NAME_RULE), Missing(f"`{{name}}` {_NAME_RULE}")] = Field(
        pattern="^[A-Za-z0-9_.-]{1,64}$"
    )
    description: str = ""
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments")
    strict: bool = Field(False, description="Calls match the schema")


class Tool(Body):
    """A function that the output may call, in OpenAI's form."""

    type: Annotated[Any, published_as(Literal["function"])] = None
    function: ToolFunction | None = None
    _body: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _with_body(cls, body: Any, read: ModelWrapValidatorHandler["Tool"]) -> "Tool":
        if isinstance(body, dict) and body.get("type") != "function":
            return read({**body, "function": None})  # which `read_function` rejects
        tool = read(body)
        tool._body = body
        return tool

    def read_function(self, where: str) -> Function:
        """`where` is the tool's place in the body. Raises ToolError or ValidationError."""
        if self.type != "function":
            raise ToolError(f"`{where}.type` must be function. Given: {str(self.type)[:64]}", f"{where}.type")
        if (inner := self.function) is None:
            raise ValidationError(f"`{where}.function.name` {_NAME_RULE}", f"{where}.function.name")
        check_letters(inner.description, f"{where}.function.description")
        if inner.parameters is not None:
            check_grammar(GrammarFields("json_schema", inner.parameters, f"{where}.function.parameters"))
        return Function(inner.name, inner.description, inner.parameters or _NO_PARAMETERS, inner.strict)

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as chat templates take it. `strict` changes how the output is sampled, not what the model sees."""
        function = self._body["function"]
        function = {name: value for name, value in function.items() if name != "strict" and value is not None}
        return {**self._body, "function": function}


def _check_num_tools(value: Any) -> Any:
    """Before any element is looked at."""
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise ValidationError(f"`tools` may have up to {MAX_TOOLS} tools. Given: {len(value)}", "tools")
    return value


class ToolGroup(Body):
    """The fields of tool calling."""

    tools: Annotated[list[Tool], fail_fast, BeforeValidator(_check_num_tools)] = Field(
        default_factory=list, description=f"Functions that the output may call, at most {MAX_TOOLS}"
    )
    tool_choice: Annotated[Any, published_as(str | dict[str, Any])] = Field(
        None, description="auto, none, required, a function, or `allowed_tools`"
    )
    parallel_tool_calls: bool = Field(True, description="Whether the output may have several calls")
    tool_prompt: str | None = Field(
        None, description="As in LoRAX, whose form of tools it selects; ignored without `tools`"
    )

    def ignored(self, path: str = "") -> list[str]:
        """Also `tool_prompt` without tools."""
        names = super().ignored(path)
        return [*names, f"{path}tool_prompt"] if self.tool_prompt is not None and not self.tools else names

    def tool_fields(self) -> ToolFields:
        """The tools of the request, NO_TOOLS where `tool_choice` is none. Raises ToolError or ValidationError."""
        choice, prompt = self.tool_choice, self.tool_prompt or None
        if not self.tools:
            if choice not in (None, "none", "auto"):
                raise ToolError("`tool_choice` needs `tools`", "tool_choice")
            return NO_TOOLS
        if prompt is not None and len(prompt) > MAX_TOOL_PROMPT:
            raise ValidationError(f"`tool_prompt` may have up to {MAX_TOOL_PROMPT} characters", "tool_prompt")
        functions = tuple(tool.read_function(f"tools[{index}]") for index, tool in enumerate(self.tools))
        names = [function.name for function in functions]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ToolError(f"`tools` has two functions with the name {twice}", "tools")
        is_required, allowed = _choice(choice, names)
        is_named = is_required and choice != "required" and len(allowed) == 1  # by OpenAI's rule that is one call
        if not allowed:
            return NO_TOOLS
        tools = tuple(tool.shown for tool in self.tools)
        parallel = self.parallel_tool_calls and not is_named
        return ToolFields(tools, functions, is_required, frozenset(allowed), parallel, prompt)


def _choice(choice: Any, names: list[str]) -> tuple[bool, list[str]]:
    """Whether a call is required, and which functions may be called; none for `none`."""
    if choice is None or choice == "auto":
        return False, names
    if choice == "required":
        return True, names
    if choice == "none":
        return False, []
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools")
        listed = inner.get("tools") if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or not isinstance(listed, list) or not listed:
            raise ValidationError("`tool_choice.allowed_tools.tools` must be a list of tools", "tool_choice")
        if inner.get("mode") not in ("auto", "required"):
            raise ValidationError("`tool_choice.allowed_tools.mode` must be auto or required", "tool_choice")
        return inner["mode"] == "required", [_named(tool, names) for tool in listed]
    return True, [_named(choice, names)]


def _named(choice: Any, names: list[str]) -> str:
    """The function of a choice: its name as LoRAX has it, or OpenAI's object."""
    name = choice
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValidationError("`tool_choice` must be none, auto, required or a function of `tools`", "tool_choice")
    if name not in names:
        raise ToolError(f"Tool with name {name[:64]} not found", "tool_choice")
    return name
