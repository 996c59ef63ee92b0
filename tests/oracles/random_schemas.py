"""Random JSON schemas from a seed, with every construct in at least a tenth of them and outputs of bounded length."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "kind", "size", "tags", "owner", "score", "note", "when", "items", "place", "first", "last", "code")
WORDS = ("red", "green", "blue", "north", "south", "small", "large", "open", "closed", "draft", "final")
PATTERNS = (
    "^[a-z]{2,6}$",
    "^[A-Z]{3}-[0-9]{2,4}$",
    "^(yes|no)$",
    "^[0-9a-f]{8}$",
    "^v[0-9]\\.[0-9]$",
    "^#[0-9A-F]{6}$",
)
FORMATS = ("date", "uuid", "ipv4")
CONSTRUCTS = ("object", "array", "enum", "const", "anyOf", "range", "pattern", "format", "$ref", "recursion")
"""What a schema may contain."""


class SchemaSource:
    """A stream of schemas. Equal seeds give equal schemas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: Schema = {}

    def next(self) -> Schema:
        """An object whose properties show one to four constructs, and its definitions."""
        self._definitions = {}
        constructs = self._random.sample(CONSTRUCTS, self._random.randint(1, 4))
        schema = self._object([self._construct(each, 2) for each in constructs])
        if self._definitions:
            schema["$defs"] = self._definitions
        return schema

    def _construct(self, name: str, depth: int) -> Schema:
        makers: dict[str, Callable[[int], Schema]] = {
            "object": lambda depth: self._object([self._any(depth) for _ in range(self._random.randint(1, 3))]),
            "array": self._array,
            "enum": lambda _: {"enum": self._random.sample([*WORDS, 1, 2, 3, None, True, False], 4)},
            "const": lambda _: {"const": self._random.choice([*WORDS, 17, True, None])},
            "anyOf": lambda depth: {"anyOf": [self._any(depth), {"type": "null"}, self._range()]},
            "range": lambda _: self._range(),
            "pattern": lambda _: {"type": "string", "pattern": self._random.choice(PATTERNS)},
            "format": lambda _: {"type": "string", "format": self._random.choice(FORMATS)},
            "$ref": self._reference,
            "recursion": self._recursion,
        }
        return makers[name](depth - 1)

    def _any(self, depth: int) -> Schema:
        kinds = CONSTRUCTS[2:9] if depth <= 0 else CONSTRUCTS
        return self._construct(self._random.choice(kinds), depth)

    def _object(self, values: list[Schema]) -> Schema:
        names = self._random.sample(NAMES, len(values))
        required = [name for name in names if self._random.random() < 0.7] or names[:1]
        properties = dict(zip(names, values, strict=True))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 1)
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": least + 2}

    def _range(self) -> Schema:
        low = self._random.randint(-50, 50)
        high = low + self._random.randint(1, 200)
        kind = self._random.choice(("minimum", "exclusiveMinimum"))
        return {"type": "integer", kind: low, "maximum": high + 1}

    def _reference(self, depth: int) -> Schema:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {}  # takes the name before the definition makes others
        self._definitions[name] = self._any(min(depth, 1))
        return {"$ref": f"#/$defs/{name}"}

    def _recursion(self, depth: int) -> Schema:
        """A list of linked nodes. Each level has its own definition: no schema bounds a recursion into itself, and a
        greedy model may never end one.
        """
        first = len(self._definitions)
        names = [f"node{first}_{level}" for level in range(3)]
        value = {"enum": self._random.sample(WORDS, 3)}
        for name, following in zip(names, [*names[1:], None], strict=True):
            rest: Schema = {"type": "null"}
            if following is not None:
                rest = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{following}"}]}
            properties = {"value": value, "rest": rest}
            node = {"type": "object", "properties": properties, "required": ["value", "rest"]}
            self._definitions[name] = {**node, "additionalProperties": False}
        return {"$ref": f"#/$defs/{names[0]}"}


def constructs_of(schema: Any) -> set[str]:
    """The constructs that a schema contains."""
    found: set[str] = set()
    waiting: list[tuple[Any, bool]] = [(schema, True)]
    while waiting:
        value, is_root = waiting.pop()
        if isinstance(value, list):
            waiting += [(each, False) for each in value]
        if not isinstance(value, dict):
            continue
        found |= {key for key in ("enum", "const", "anyOf", "pattern", "format", "$ref") if key in value}
        found |= {"range"} if "maximum" in value else set()
        found |= {"array"} if "maxItems" in value else set()
        found |= {"object"} if "properties" in value and not is_root else set()
        waiting += [(each, False) for each in value.values()]
    if any(name.startswith("node") for name in schema.get("$defs", {})):
        found.add("recursion")
    return found


def schemas(number: int, seed: int) -> list[Schema]:
    """`number` schemas."""
    source = SchemaSource(seed)
    return [source.next() for _ in range(number)]
