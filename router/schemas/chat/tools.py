"""Reader of the fields of tool calling: which functions a request has, and whether the output must call one."""

import re
from dataclasses import dataclass, field
from typing import Any

from lorikeet.router.errors import ToolError, ValidationError
from lorikeet.router.schemas.fields import Fields
from lorikeet.router.schemas.grammar import GrammarFields, check_grammar, check_letters

MAX_TOOLS = 128
MAX_TOOL_PROMPT = 16 << 10
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
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


def read_tools(fields: Fields) -> ToolFields:
    """The tools of a body, NO_TOOLS where `tool_choice` is none. Raises ToolError, ValidationError or WrongJsonType."""
    value, choice = fields.take("tools"), fields.take("tool_choice")
    parallel = fields.optional_flag("parallel_tool_calls")
    if value is None or value == []:
        if choice not in (None, "none", "auto"):
            raise ToolError("`tool_choice` needs `tools`", "tool_choice")
        if not fields.has("tool_prompt"):  # else it is named as ignored
            fields.take("tool_prompt")
        return NO_TOOLS
    prompt = fields.text("tool_prompt") or None
    if not isinstance(value, list):
        raise ValidationError("`tools` must be a list", "tools")
    if len(value) > MAX_TOOLS:
        raise ValidationError(f"`tools` may have up to {MAX_TOOLS} tools. Given: {len(value)}", "tools")
    if prompt is not None and len(prompt) > MAX_TOOL_PROMPT:
        raise ValidationError(f"`tool_prompt` may have up to {MAX_TOOL_PROMPT} characters", "tool_prompt")
    functions = tuple(_function(fields, tool, f"tools[{index}]") for index, tool in enumerate(value))
    names = [each.name for each in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ToolError(f"`tools` has two functions with the name {twice}", "tools")
    is_required, allowed = _choice(choice, names)
    is_named = is_required and choice != "required" and len(allowed) == 1  # by OpenAI's rule that is one call
    if not allowed:
        return NO_TOOLS
    tools = tuple(_shown(tool) for tool in value)
    return ToolFields(tools, functions, is_required, frozenset(allowed), parallel is not False and not is_named, prompt)


def _function(body: Fields, tool: Any, where: str) -> Function:
    if not isinstance(tool, dict):
        raise ValidationError(f"`{where}` must be an object", where)
    fields = body.nested(where, tool)
    if (kind := fields.take("type")) != "function":
        raise ToolError(f"`{where}.type` must be function. Given: {str(kind)[:64]}", f"{where}.type")
    inner = fields.child("function")
    name, description, parameters = inner.take("name"), inner.text("description"), inner.mapping("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValidationError(
            f"`{where}.function.name` must be 1 to 64 letters, digits or any of _.-", f"{where}.function.name"
        )
    check_letters(description or "", f"{where}.function.description")
    if parameters is not None:
        check_grammar(GrammarFields("json_schema", parameters, f"{where}.function.parameters"))
    return Function(name, description or "", parameters or _NO_PARAMETERS, inner.flag("strict"))


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """`strict` changes how the output is sampled, not what the model is shown."""
    function = {name: value for name, value in tool["function"].items() if name != "strict" and value is not None}
    return {**tool, "function": function}


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
