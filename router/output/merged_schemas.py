"""JSON schemas as parts of one: definitions move to the outermost schema, and references follow them."""

from typing import Any

from lorikeet.router.errors import ToolError

_PLACES = ("$defs", "definitions")


class MergedSchemas:
    """Schemas of one request that become parts of another schema."""

    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}
        self._num_schemas = 0

    def add(self, schema: Any) -> Any:
        """The schema without its definitions. Raises ToolError for a reference that cannot follow."""
        if not isinstance(schema, dict):
            return schema
        self._num_schemas += 1
        prefix = f"{self._num_schemas}_"
        moved: dict[str, Any] = _moved(schema, prefix)
        for place in _PLACES:
            found = moved.pop(place, None)
            for name, each in (found if isinstance(found, dict) else {}).items():
                self._definitions[prefix + name] = each
        moved.pop("$schema", None)
        moved.pop("x-guidance", None)
        return moved

    def around(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The outermost schema with all definitions."""
        return {**schema, "$defs": self._definitions} if self._definitions else schema


def _moved(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_moved(each, prefix) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {name: each if name in ("const", "enum") else _moved(each, prefix) for name, each in value.items()}
    target = value.get("$ref")
    if isinstance(target, str):
        place, _, name = target.removeprefix("#/").partition("/")
        if not target.startswith("#/") or place not in _PLACES or "/" in name:
            raise ToolError(f"the reference {target[:200]} is not supported: use #/$defs/NAME", "tools")
        moved["$ref"] = f"#/$defs/{prefix}{name}"
    return moved
