"""Schemas of functions' arguments as far as they are enforced."""

from typing import Any

from lorikeet.router.errors import ToolError
from lorikeet.router.schemas.chat.tools import Function, ToolFields
from lorikeet.router.text.json_schemas import SchemaError, enforced

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


class EnforcedParameters:
    """The schemas of one request's functions, and the paths of what is left out of those that are not strict."""

    def __init__(self, tools: ToolFields, is_loose: bool = False) -> None:
        """`is_loose`: no keyword of a function that is not strict is enforced."""
        self._tools = tools
        self._is_loose = is_loose
        self.left_out: list[str] = []

    def of(self, function: Function) -> dict[str, Any]:
        """Raises ToolError for a keyword of a strict function that cannot be enforced."""
        if self._is_loose and not function.is_strict:
            return self.any_of(function)
        try:
            schema, left_out = enforced(function.parameters, function.is_strict)
        except SchemaError as problem:
            raise ToolError(f"the parameters of the strict function {function.name}: {problem}", "tools") from None
        self.left_out += [f"{self.path(function)}.{each}" for each in left_out]
        made: dict[str, Any] = schema
        return made

    def any_of(self, function: Function) -> dict[str, Any]:
        """Any arguments, for a function that is not strict."""
        if self.path(function) not in self.left_out:
            self.left_out.append(self.path(function))
        return ANY_ARGUMENTS

    def path(self, function: Function) -> str:
        """The field of the request that has the schema."""
        return f"tools[{self._tools.functions.index(function)}].function.parameters"
