"""What routes answer, as pydantic models: the document at `/openapi.json` is made from them."""

from typing import Any, Literal

from pydantic import BaseModel, Field, RootModel

from lorikeet.proto.draft_sources import SOURCE_NAMES
from lorikeet.router.schemas.chat import ToolCall
from lorikeet.router.schemas.generation import METHODS

FinishReason = Literal["length", "eos_token", "stop_sequence"]
Object = dict[str, Any]


class ReceiptTokens(BaseModel):
    num_tokens: int
    sha256: str = Field(description="Of the ids as little-endian 32-bit integers")
    token_ids: list[int] | None = Field(None, description="In answers; not in the operator's file")


class ReceiptOutput(ReceiptTokens):
    finish_reason: FinishReason


class Receipt(BaseModel):
    """What is needed to reproduce a text; see docs/receipts.md."""

    receipt: Literal[1] = Field(description="Version of the format")
    created: int
    request_id: str
    version: str
    model_id: str
    base_digest: str = Field(description="Of the files of configuration and weights")
    tokenizer_digest: str
    dtype: str
    quantization: str | None = Field(description="Quantization of the base, as in `--quantize`")
    num_ranks: int = Field(description="Tensor-parallel ranks, each of which rounds its own sums")
    kv_cache_dtype: str | None = Field(description="Null for the dtype of the model")
    device: str
    max_total_tokens: int
    adapter: dict[str, Any] | None = Field(description="Named as in requests, with the digest of its content")
    speculation: dict[str, Any]
    parameters: dict[str, Any] = Field(description="Seed, length, stop strings and all sampling parameters")
    prompt: ReceiptTokens
    output: ReceiptOutput


class SpeculativeDecoding(BaseModel):
    """vLLM's."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int] = Field(description="Steps by the number of accepted draft tokens")
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_steps: int
    num_spec_tokens: int
    per_step_accepted: None
    per_step_drafted: None


class RequestMetrics(BaseModel):
    speculative_decoding: SpeculativeDecoding


class ReportedAnswer(BaseModel):
    metrics: RequestMetrics | None = Field(None, description="Of one sequence with draft tokens")
    metadata: dict[str, str] | None = None
    service_tier: Literal["default"] | None = Field(None, description="If the request has one")


class CallDelta(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: dict[str, str] = Field(description="First `name`, then parts of `arguments`")


class AnsweredMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class PredictResponse(RootModel[str]):
    """The text only."""


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


# named as in LoRAX's specification: the names of these classes are those of `/openapi.json`
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


class TokenizeToken(BaseModel):
    id: int
    text: str
    start: int
    stop: int


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
    message: AnsweredMessage
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


class PromptUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    """OpenAI's `data`, and the same as LoRAX's `embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage
    embeddings: list[Embedding]


class CohereEmbeddings(BaseModel):
    """Vectors in each type that was asked for."""

    float_: list[list[float]] | None = Field(None, alias="float")
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereApiVersion(BaseModel):
    version: str


class CohereTokens(BaseModel):
    input_tokens: int


class CohereMeta(BaseModel):
    api_version: CohereApiVersion
    billed_units: CohereTokens
    tokens: CohereTokens


class CohereEmbedResponse(BaseModel):
    """Answer of `/v2/embed`."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]


class EmbedResponse(BaseModel):
    embeddings: list[float]


class Pooled(BaseModel):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: PromptUsage


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class Document(BaseModel):
    text: str


class Ranked(BaseModel):
    index: int
    document: Document
    relevance_score: float


class RerankResponse(BaseModel):
    id: str
    created: int
    model: str
    usage: PromptUsage
    results: list[Ranked]


class TokenCount(BaseModel):
    """vLLM's answer."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizeAnswer(RootModel[list[TokenizeToken] | TokenCount]):
    """LoRAX's list, or vLLM's object."""


class ChatTokenizeAnswer(BaseModel):
    tokenize_response: list[TokenizeToken]
    templated_text: str


class DetokenizeAnswer(BaseModel):
    prompt: str


class InvocationAnswer(
    RootModel[
        list[GenerateResponse] | ChatCompletionResponse | CompletionResponse
        | EmbeddingsResponse | PoolingResponse | ScoreResponse | RerankResponse
    ]
):  # fmt: skip
    """What the route of the body's API answers."""


class InvocationEvent(RootModel[StreamResponse | ChatCompletionChunk | CompletionChunk]):
    """One event of its stream."""


class ResponsesAnswer(ReportedAnswer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[Object] = Field(description="Items: reasoning, messages, function calls")
    usage: Object | None
    error: Object | None
    incomplete_details: Object | None


class ResponsesEvent(BaseModel):
    type: str = Field(description="Also the name of the event")
    sequence_number: int


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class MessageAnswer(ReportedAnswer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Object] = Field(description="Blocks: thinking, text, tool_use")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: Object


class MessageEvent(BaseModel):
    type: str = Field(description="Also the name of the event")


class CountedTokens(BaseModel):
    input_tokens: int


class AnthropicError(BaseModel):
    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    type: Literal["error"]
    error: AnthropicError
    request_id: str


# named as in OpenAI's specification: the names of these classes are those of `/openapi.json`
class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str | None = Field(None, description="Of an adapter: its id at its source")
    parent: str | None = Field(None, description="Of an adapter: the base model")
    adapter_source: str | None = None
    problem: str | None = Field(None, description="Why a listed adapter is not served")
    tier: Literal["device", "host", "disk"] | None = Field(
        None, description="Where its content is: in a slot of a shard, in a shard's memory, or on disk"
    )


class DeletedModel(BaseModel):
    id: str
    object: Literal["model"]
    deleted: bool


class AdapterList(BaseModel):
    named: list[dict[str, Any]]
    loaded: list[dict[str, Any]]


class Reloaded(BaseModel):
    num_entries: int
    num_changed: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
