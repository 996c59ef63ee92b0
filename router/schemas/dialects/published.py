"""Published models of dialects' bodies."""

from typing import Any, Literal

from pydantic import BaseModel, Field

Object = dict[str, Any]


class InputItem(BaseModel):
    """A message, or another item of a conversation."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Object] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Object] | None = None


class ResponsesRequest(BaseModel):
    """Further fields are those of chat completions."""

    model: str = Field(description="The base model, an adapter's id or an alias")
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, ge=0, le=1)
    stream: bool | None = False
    store: bool | None = Field(None, description="Nothing is stored: answers have false")
    tools: list[Object] | None = Field(None, description="Functions")
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = True
    text: Object | None = Field(None, description="`format` (text, json_object or json_schema) and `verbosity`")
    reasoning: Object | None = Field(None, description="`effort`")
    include: list[str] | None = Field(None, description="`message.output_text.logprobs`")
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: dict[str, str] | None = None
    user: str | None = None


class MessageParameter(BaseModel):
    role: Literal["user", "assistant"]
    content: str | list[Object] = Field(description="Blocks: text, tool_use, tool_result, thinking")


class CountTokensRequest(BaseModel):
    """Further fields are those of chat completions."""

    model: str = Field(description="The base model, an adapter's id or an alias")
    messages: list[MessageParameter] = Field(min_length=1, description="One of the assistant at the end is continued")
    system: str | list[Object] | None = None
    tools: list[Object] | None = Field(None, description="With `name`, `description` and `input_schema`")
    tool_choice: Object | None = None
    thinking: Object | None = Field(None, description="For chat templates that read `enable_thinking` or `thinking`")
    output_config: Object | None = Field(None, description="`format` (json_schema) and `effort`")


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    stream: bool | None = False
    temperature: float | None = Field(1.0, ge=0, le=1)
    top_p: float | None = Field(1.0, ge=0, le=1)
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Object | None = Field(None, description="`user_id`")


class CohereEmbedRequest(BaseModel):
    """Body of `/v2/embed`."""

    model: str = Field(description="The base model, an adapter or an alias")
    texts: list[str] | None = None
    inputs: list[dict[str, object]] | None = Field(None, description="Objects with `content`: a list of texts")
    input_type: str | None = Field(None, description="Chooses one of the model's prompts")
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    output_dimension: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    truncate: Literal["NONE", "START", "END"] | None = None
    adapter_id: str | None = None
    adapter_source: str | None = None
    api_token: str | None = None
    priority: int | None = None
