"""The fields of tool calling: which functions a request has, and whether the output must call one."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from lorikeet.router.errors import ToolError, ValidationError
from lorikeet.router.schemas.grammar import GrammarFields, check_grammar, check_letters
from lorikeet.router.schemas.model import Body, Missing, Rule, fail_fast, published_as

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
    """As chat templates take them."""
    functions: tuple[Function, ...] = ()
    """The same."""
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
        return tuple(each for each in self.functions if each.name in self.allowed_names)

    @property
    def is_strict(self) -> bool:
        """Whether one of them is strict."""
        return any(each.is_strict for each in self.allowed)


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
        """As chat templates take it. `strict` changes how the output is sampled, not what the model is shown."""
        function = self._body["function"]
        function = {name: value for name, value in function.items() if name != "strict" and value is not None}
        return {**self._body, "function": function}


def _check_number(value: Any) -> Any:
    """Before any element is looked at."""
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise ValidationError(f"`tools` may have up to {MAX_TOOLS} tools. Given: {len(value)}", "tools")
    return value


class ToolGroup(Body):
    """The fields of tool calling."""

    tools: Annotated[list[Tool], fail_fast, BeforeValidator(_check_number)] = Field(
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
        return inner["mode"] == "required", [_named(each, names) for each in listed]
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
