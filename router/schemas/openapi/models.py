"""Pydantic models of requests and answers, for the document at `/openapi.json` only.

Requests are not parsed with these: the readers in this folder word errors as LoRAX and OpenAI do. A test compares both.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from lorikeet.proto.draft_sources import SOURCE_NAMES
from lorikeet.router.schemas.fields import MAX_SALT
from lorikeet.router.schemas.openapi.chat import ChatDelta, ChatMessage, Tool
from lorikeet.router.schemas.openapi.constraints import Constrained, Structured
from lorikeet.router.schemas.openapi.receipts import FinishReason, Receipt
from lorikeet.router.schemas.openapi.report import ReportedAnswer, ReportedRequest
from lorikeet.router.schemas.speculation import METHODS

AdapterSource = Literal["hub", "local", "s3"]


class MergedAdapters(BaseModel):
    """Several adapters merged into one, with the parameters of PEFT's `add_weighted_adapter`."""

    ids: list[str] = Field(min_length=1, max_length=32)
    weights: list[float]
    merge_strategy: Literal["linear", "ties", "dare_linear", "dare_ties", "cat"] | None = "linear"
    density: float | None = Field(None, description="Above 0 and at most 1; for ties, dare_linear and dare_ties")
    majority_sign_method: Literal["total", "frequency"] | None = "total"


_CACHE_SALT = Field(
    None, min_length=1, max_length=MAX_SALT, description="Requests share cached prefixes only under equal salts"
)
_ASKED_RECEIPT = Field(False, description="Adds what is needed to reproduce the text, for `lorikeet-replay`")


class _Speculative(Structured):
    """Speculation fields of every generating route."""

    speculative_tokens: int | None = Field(None, ge=0, description="Maximum draft tokens per step; 0 for none")
    speculative_method: Annotated[str, Field(json_schema_extra={"enum": [*METHODS]})] | None = Field(
        None, description="What proposes draft tokens; the text does not depend on it"
    )
    speculative_schedule: Literal["constant", "heuristic", "auto"] | None = Field(
        None, description="Draft length: always the maximum, by the last step's acceptance, or the fastest"
    )
    speculative_verification: Literal["shared-noise", "rejection", "google", "deepmind"] | None = Field(
        None,
        description="Verification of a draft model's tokens: shared-noise keeps the text, rejection its distribution; "
        "requests with a `seed` always use shared-noise",
    )
    speculative_history: bool | None = Field(
        None, description="Whether outputs of earlier requests of the same tenant and adapter are proposed as drafts"
    )
    speculative_verify: str | None = Field(None, deprecated=True, description="Use `speculative_verification`")
    priority: int | None = Field(
        0, ge=-(2**31), lt=2**31, description="Of one adapter's waiting requests, lower ones are served first"
    )
    heads_id: str | None = Field(None, description="An adapter whose Medusa heads are used; named like `adapter_id`")


class _Parameters(_Speculative, Constrained):
    adapter_id: str | None = Field(
        None, description="An alias, or `id` or `id@revision` within the source; empty: the default adapter, if any"
    )
    adapter_source: AdapterSource | None = Field(None, description="Default: the server's")
    api_token: str | None = Field(None, description="The source's token; default: that of the Authorization header")
    merged_adapters: MergedAdapters | None = None
    cache_salt: str | None = _CACHE_SALT
    best_of: int | None = Field(None, description="Number of texts, of which the likeliest is returned; needs sampling")
    temperature: float | None = Field(None, description="0 is greedy; 0 or 1 alone do not sample")
    repetition_penalty: float | None = Field(None, gt=0)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    top_k: int | None = Field(None, gt=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, lt=1)
    do_sample: bool | None = False
    seed: int | None = Field(None, ge=0, description="The same seed gives the same text, alone or in any batch")
    max_new_tokens: int | None = Field(
        None, gt=0, description="Default: what the prompt leaves of max_total_tokens, or of 4096 where that is not set"
    )
    stop: list[str] | None = Field(None, description="Ends the text, which includes it")
    stop_sequences: list[str] | None = Field(None, description="More of `stop`")
    add_special_tokens: bool | None = Field(True, description="Whether the tokenizer's special tokens are added")
    top_n_tokens: int | None = Field(None, le=256, description="Likeliest tokens returned in `top_tokens`, as in TGI")
    truncate: int | None = Field(None, gt=0, description="Keeps only this number of tokens, from the end of the prompt")
    return_full_text: bool | None = Field(False, description="Prepends the prompt to the text")
    watermark: bool | None = False
    return_k_alternatives: int | None = Field(None, gt=0, description="Likeliest tokens returned with each token")


class GenerateParameters(_Parameters):
    details: bool | None = False
    receipt: bool | None = _ASKED_RECEIPT
    decoder_input_details: bool | None = Field(False, description="Log probabilities of the prompt; not when streaming")


class PredictRequest(_Parameters):
    """By default 40 tokens, `top_k` 10, `top_p` 0.9, four draft tokens per step, and the prompt before the text."""

    prompt: str = Field(min_length=1)


class PredictResponse(RootModel[str]):
    """The text only."""


class GenerateRequest(BaseModel):
    inputs: str | list[int] = Field(min_length=1, description="A text or token ids")
    parameters: GenerateParameters | None = None


class CompatGenerateRequest(GenerateRequest):
    stream: bool | None = False


class PrefillToken(BaseModel):
    id: int
    text: str
    logprob: float | None


class AlternativeToken(PrefillToken):
    pass


class Token(PrefillToken):
    special: bool
    alternative_tokens: list[AlternativeToken] | None = None
    skipped: bool = Field(description="Emitted by the same step as the token before it")
    source: str = Field(
        description="prefill: the first; target: of a step without draft tokens; resample: the target's token where a "
        "draft token was rejected; bonus: its token after all were accepted; others: a draft token, accepted",
        json_schema_extra=lambda schema: schema.update(enum=list(SOURCE_NAMES.values())),
    )


class SpeculationReport(BaseModel):
    """Counts of speculative decoding: `drafted` tokens were verified, `accepted` of them emitted."""

    method: str = Field(json_schema_extra={"enum": [name for name in METHODS.values() if name != "off"]})
    verification: Literal["shared-noise", "rejection"]
    verify: Literal["shared-noise", "rejection"] = Field(deprecated=True, description="The same as `verification`")
    steps: int
    drafted: int
    accepted: int
    resampled: int
    bonus: int
    draft_seconds: float = Field(description="Proposing, in the steps that verified draft tokens of this request")
    verify_seconds: float = Field(description="The forward of the model in them")
    accept_seconds: float = Field(description="Sampling and accepting in them")
    sources: dict[str, int] = Field(description="Tokens by their `source`, which sum to `generated_tokens`")


class _Sequence(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None


class TopToken(PrefillToken):
    special: bool


class BestOfSequence(_Sequence):
    generated_text: str
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[TopToken]] | None = Field(None, description="With `top_n_tokens`")


class StreamDetails(_Sequence):
    prompt_tokens: int
    speculation: SpeculationReport | None = Field(None, description="Where speculation was possible")
    receipt: Receipt | None = Field(None, description="Where asked for")


class Details(StreamDetails):
    skipped_tokens: int
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[TopToken]] | None = Field(None, description="With `top_n_tokens`")
    best_of_sequences: list[BestOfSequence] | None = None


class GenerateResponse(BaseModel):
    generated_text: str
    details: Details | None = None
    receipt: Receipt | None = Field(None, description="Where asked for without details")


class StreamResponse(BaseModel):
    token: Token
    top_tokens: list[TopToken] | None = Field(None, description="With `top_n_tokens`")
    generated_text: str | None
    details: StreamDetails | None
    receipt: Receipt | None = Field(None, description="In the last event, where asked for without details")


class ErrorResponse(BaseModel):
    error: str
    error_type: str


class OpenAIError(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorResponse(BaseModel):
    error: OpenAIError


class TokenizeRequest(BaseModel):
    inputs: str
    add_special_tokens: bool | None = True


class TokenizeToken(BaseModel):
    id: int
    text: str
    start: int
    stop: int


class _OpenAIRequest(_Speculative, Constrained, ReportedRequest):
    model: str = Field(description="The base model, an adapter's id or an alias")
    temperature: float | None = Field(1.0, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(1.0, ge=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    n: int | None = Field(1, ge=1, le=128)
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, description="The same as `max_tokens`")
    seed: int | None = None
    stop: str | list[str] | None = Field(None, description="Ends the text, which excludes it")
    stream: bool | None = False
    user: str | None = None
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens to the prompt; default: not to a rendered chat"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keeps only this number of tokens of the prompt; -1: as many as a prompt may have"
    )
    truncation_side: Literal["left", "right"] | None = Field("left", description="Where tokens are removed")
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="Of the prompt; not when streaming")
    logprob_token_ids: list[int] | None = Field(
        None, description="Needs `logprobs`: tokens that are listed in place of the likeliest", max_length=256
    )
    details: bool | None = Field(False, description="Adds `tokens` to each choice, as /generate lists them")
    return_token_ids: bool | None = Field(False, description="Adds `prompt_token_ids` and `token_ids`")
    return_tokens_as_token_ids: bool | None = Field(False, description="Writes tokens in `logprobs` as `token_id:<id>`")
    receipt: bool | None = _ASKED_RECEIPT
    adapter_id: str | None = Field(None, description="As on LoRAX's routes; `model` is then the base model")
    merged_adapters: MergedAdapters | None = None
    adapter_source: AdapterSource | None = None
    api_token: str | None = None
    do_sample: bool | None = Field(None, description="False is greedy")
    cache_salt: str | None = _CACHE_SALT
    request_id: str | None = Field(
        None, pattern="^[A-Za-z0-9._:-]{1,128}$", description="The end of the answer's `id`; default: a random one"
    )
    prediction: dict[str, Any] | None = Field(
        None, description='{"type": "content", "content": a text that the output may repeat}'
    )


class CompletionRequest(_OpenAIRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = False
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = Field(None, description="What follows the output, for models with fill-in-the-middle tokens")


class ChatCompletionRequest(_OpenAIRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = Field(False, description="The output continues the final message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template")
    chat_template: str | None = Field(None, description="Needs the flag `--trust-request-chat-template`")
    documents: list[dict[str, Any]] | None = Field(None, description="For chat templates that read them")
    reasoning_effort: str | None = Field(None, description="For chat templates that read it")
    verbosity: str | None = Field(None, description="For chat templates that read it")
    tools: list[Tool] | None = Field(None, max_length=128, description="Functions that the output may call")
    tool_choice: str | dict[str, Any] | None = Field(None, description="auto, none, required, or a function")
    parallel_tool_calls: bool | None = Field(True, description="Whether the output may have several calls")
    tool_prompt: str | None = Field(None, description="As in LoRAX, whose form of tools it selects")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionDetails(BaseModel):
    accepted_prediction_tokens: int | None = Field(None, description="Where speculation was possible, as the next two")
    rejected_prediction_tokens: int | None = None
    speculation: SpeculationReport | None = None
    reasoning_tokens: int | None = Field(None, description="Where the output has reasoning")


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: CompletionDetails | None = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None = Field(description="Among all tokens, 1 for the likeliest; null from shards of version 0.1")
    decoded_token: str


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = Field(None, description="The stop token or stop string that ended the text")
    prompt_token_ids: list[int] | None = Field(None, description="With `return_token_ids`")
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`")
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(None, description="By token id; if asked for")
    tokens: list[Token] | None = Field(None, description="With `details`")


class _OpenAIResponse(ReportedAnswer):
    id: str
    created: int
    model: str
    usage: Usage
    system_fingerprint: str
    receipt: Receipt | None = Field(None, description="Where asked for; of a stream in the last event")


class CompletionResponse(_OpenAIResponse):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None
    stop_reason: int | str | None = Field(None, description="The stop token or stop string that ended the text")
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`")
    tokens: list[Token] | None = Field(None, description="With `details`")


class ChatCompletionResponse(_OpenAIResponse):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = Field(None, description="With `return_token_ids`")
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(None, description="By token id; if asked for")


class _OpenAIChunk(ReportedAnswer):
    """Data of one event; the last event is `[DONE]`."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = Field(None, description="In the last event, where `include_usage` asks for it")
    receipt: Receipt | None = None


class CompletionChunk(_OpenAIChunk):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    logprobs: dict[str, Any] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    tokens: list[Token] | None = None


class ChatCompletionChunk(_OpenAIChunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
