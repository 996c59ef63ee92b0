"""What an assistant says, as events that do not depend on an API's dialect, and the message that they add up to.

A reader (`reader.py`) turns the chunks of one generation into events. Each route writes events in its own shapes. The
order is: deltas and calls as they come; of a call its begin, at least one arguments delta, its end; last, one Finish.
"""

import secrets
import string
from dataclasses import dataclass, field
from enum import Enum

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Chat templates of Mistral's models accept no other length."""


class FinishKind(Enum):
    """Why the output ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of a function."""

    index: int
    """Index of the call in the message, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, which are the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of a call are complete."""

    index: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The output is complete."""

    kind: FinishKind
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it."""


Event = ContentDelta | ReasoningDelta | ToolCallBegin | ArgumentsDelta | ToolCallEnd | Finish


@dataclass
class MessageCall:
    """A call of a function."""

    id: str
    name: str
    arguments: str
    """The text of a JSON object."""


@dataclass
class Message:
    """What the events of one output add up to."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[MessageCall] = field(default_factory=list)
    finish: Finish = field(default_factory=lambda: Finish(FinishKind.STOP))

    def add(self, events: list[Event]) -> None:
        """Take the next events."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallBegin(_, identity, name):
                    self.tool_calls.append(MessageCall(identity, name, ""))
                case ArgumentsDelta(index, text):
                    self.tool_calls[index].arguments += text
                case Finish():
                    self.finish = event


def whole_call(index: int, name: str, arguments: str) -> list[Event]:
    """The events of a call that is complete."""
    return [ToolCallBegin(index, new_call_id(), name), ArgumentsDelta(index, arguments), ToolCallEnd(index)]


def new_call_id() -> str:
    """A random id."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
