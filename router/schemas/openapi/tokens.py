"""Published models of routes that tokenize, and of SageMaker's `/invocations`, which takes bodies of several APIs."""

from typing import Any

from pydantic import BaseModel, Field, RootModel

from lorikeet.router.schemas.openapi import chat, models, pooled


class TokenizePrompt(BaseModel):
    """vLLM's."""

    model: str | None = Field(None, description="Not needed for a prompt")
    prompt: str
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChat(BaseModel):
    """vLLM's and TGI's."""

    model: str | None = Field(None, description="The model whose chat template renders the messages")
    messages: list[chat.ChatMessage] = Field(min_length=1)
    add_special_tokens: bool | None = False
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class TokenizeBody(RootModel[models.TokenizeRequest | TokenizePrompt | TokenizeChat]):
    """LoRAX's body, or one of vLLM's."""


class TokenCount(BaseModel):
    """vLLM's answer."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizeAnswer(RootModel[list[models.TokenizeToken] | TokenCount]):
    """LoRAX's list, or vLLM's object."""


class ChatTokenizeAnswer(BaseModel):
    tokenize_response: list[models.TokenizeToken]
    templated_text: str


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(BaseModel):
    prompt: str


class InvocationBody(
    RootModel[
        models.CompatGenerateRequest | models.ChatCompletionRequest | models.CompletionRequest
        | pooled.InputFields | pooled.ScoreRequest | pooled.RerankRequest
    ]
):  # fmt: skip
    """LoRAX's body, a chat, or a completion; of a model without text a body of its routes."""


class InvocationAnswer(
    RootModel[
        list[models.GenerateResponse] | models.ChatCompletionResponse | models.CompletionResponse
        | pooled.EmbeddingsResponse | pooled.PoolingResponse | pooled.ScoreResponse | pooled.RerankResponse
    ]
):  # fmt: skip
    """What the route of the body's API answers."""


class InvocationEvent(RootModel[models.StreamResponse | models.ChatCompletionChunk | models.CompletionChunk]):
    """One event of its stream."""
