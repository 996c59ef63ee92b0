"""LoRAX's form of tools, for models without a tool format: tools at the end of the last message, a JSON schema for the
output, whose function `no_tool` is text.
"""

import json
from dataclasses import replace
from typing import Any

from lorikeet.router.errors import ToolError
from lorikeet.router.output.events import ContentDelta, Event, Finish, FinishKind, whole_call
from lorikeet.router.output.output_grammar import EnforcedParameters, MergedSchemas
from lorikeet.router.output.reader import Reader
from lorikeet.router.requests.request import FinishReason
from lorikeet.router.schemas.chat import Function, ToolFields
from lorikeet.router.schemas.grammar import GrammarFields

NO_TOOL = "no_tool"
_NO_TOOL = Function(
    NO_TOOL,
    "Open ended response with no specific tool selected",
    {
        "type": "object",
        "properties": {"content": {"type": "string", "description": "The response content"}},
        "required": ["content"],
    },
    False,
)
DEFAULT_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that "
    "best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument "
    "name and its value}.Do not use variables.\n"
)


def with_tools(messages: list[dict[str, Any]], tools: ToolFields, *, in_template: bool) -> list[dict[str, Any]]:
    """The messages with the tools, and `tool_prompt`, at the end of the last one. With `in_template` the chat template
    shows the tools.
    """
    shown = [*tools.tools, *([] if tools.is_required else [_tool(_NO_TOOL)])]
    listed = "" if in_template else json.dumps(shown, ensure_ascii=False, separators=(",", ":")) + "\n"
    text = f"\n---\n{listed}{tools.prompt or DEFAULT_PROMPT}"
    plain = messages if in_template else plain_turns(messages)
    return [*plain[:-1], {**plain[-1], "content": plain[-1]["content"] + text}]


def schema_of(tools: ToolFields, parameters: EnforcedParameters) -> GrammarFields:
    """What the output must match. Raises ToolError."""
    merged = MergedSchemas()
    functions = [*tools.allowed, *([] if tools.is_required else [_NO_TOOL])]
    choices = [_choice(function, merged, parameters) for function in functions]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"function": {"anyOf": choices}},
        "required": ["function"],
        "additionalProperties": False,
    }
    return GrammarFields("json_schema", merged.around(schema), "tools")


class LoraxReader:
    """Reads an output whose answer matches `schema_of`: when it is complete it is a call or content."""

    def __init__(self, reader: Reader) -> None:
        """`reader` finds the answer in the output."""
        self._reader = reader
        self._texts: list[str] = []

    async def read(self, text: str, finish: FinishReason | None, stop_reason: int | str | None = None) -> list[Event]:
        events: list[Event] = []
        for event in await self._reader.read(text, finish, stop_reason):
            match event:
                case ContentDelta(part):
                    self._texts.append(part)
                case Finish():
                    events += _answer("".join(self._texts), event)
                case _:
                    events.append(event)
        return events

    def close(self) -> None:
        self._reader.close()


def _answer(whole: str, finish: Finish) -> list[Event]:
    """The events of a whole answer."""
    function = _function(whole)
    if function is None:
        return [ContentDelta(whole), finish] if whole else [finish]
    name = function.pop("_name")
    if name == NO_TOOL:
        return [ContentDelta(str(function.get("content", ""))), finish]
    kind = FinishKind.TOOL_CALLS if finish.kind is FinishKind.STOP else finish.kind
    return [*whole_call(0, name, json.dumps(function, ensure_ascii=False)), replace(finish, kind=kind)]


def _function(text: str) -> dict[str, Any] | None:
    """The function of a complete output."""
    try:
        function = json.loads(text)["function"]
        function["_name"].encode()
        json.dumps(function, ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return function if isinstance(function, dict) else None


def _tool(function: Function) -> dict[str, Any]:
    shown = {"description": function.description, "name": function.name, "parameters": function.parameters}
    return {"type": "function", "function": shown}


def _choice(function: Function, merged: MergedSchemas, parameters: EnforcedParameters) -> dict[str, Any]:
    """A function's arguments with its name among them."""
    schema = _merged(function, merged, parameters)
    properties, required = schema.pop("properties", {}), schema.pop("required", [])
    for name in sorted(schema.keys() - {"type", "title", "description", "additionalProperties"}):
        if function.is_strict:
            raise ToolError(f"the parameters of {function.name} must be an object with `properties` alone", "tools")
        parameters.left_out.append(f"{parameters.path(function)}.{name}")
    if "_name" in properties:
        raise ToolError(f"a parameter of {function.name} has the name _name, which the output uses", "tools")
    return {
        "type": "object",
        "properties": {"_name": {"type": "string", "const": function.name}, **properties},
        "required": ["_name", *required],
        "additionalProperties": schema.get("additionalProperties") is True,
    }


def _merged(function: Function, merged: MergedSchemas, parameters: EnforcedParameters) -> dict[str, Any]:
    if function is _NO_TOOL:
        return dict(function.parameters)
    try:
        schema: dict[str, Any] = merged.add(parameters.of(function))
    except ToolError:
        if function.is_strict:
            raise
        schema = dict(parameters.any_of(function))
    return schema


def plain_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for templates that do not know tools. Results are one turn with what the user writes after them:
    some of these templates reject two turns of the user in a row.
    """
    turns: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        plain, is_result = _plain(message), message["role"] == "tool"
        if turns and plain["role"] == turns[-1]["role"] == "user" and (is_result or after_result):
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{plain['content']}"}
        else:
            turns.append(plain)
        after_result = is_result
    return turns


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message for templates that do not know tools: calls as the output has them, results as the user's text."""
    if message["role"] == "tool":
        return {"role": "user", "content": message["content"]}
    if "tool_calls" not in message:
        return message
    texts = [message["content"], *(_plain_call(**call["function"]) for call in message["tool_calls"])]
    return {"role": message["role"], "content": "\n".join(text for text in texts if text)}


def _plain_call(name: str, arguments: dict[str, Any] | str) -> str:
    """A call as an output has it; arguments that are no object follow its name as they were written."""
    written = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return json.dumps({"function": {"_name": name, **written}}, ensure_ascii=False)
