"""Pydantic models of messages and tools, for the document at `/openapi.json` only."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="The text of a JSON object")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolFunction(BaseModel):
    name: str = Field(pattern="^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments")
    strict: bool | None = Field(False, description="Calls match the schema")


class Tool(BaseModel):
    type: Literal["function"]
    function: ToolFunction


class CallDelta(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: dict[str, str] = Field(description="First `name`, then parts of `arguments`")


class ContentPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    role: str
    content: str | list[ContentPart] | None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, description="Of the role assistant")
    tool_call_id: str | None = Field(None, description="Of the role tool")
    reasoning_content: str | None = Field(None, description="Of the role assistant")


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None
