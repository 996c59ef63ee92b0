"""The schema that clients read: pydantic models of requests and answers, for `/openapi.json` alone.

Requests are not parsed with these: the readers beside this file word errors as LoRAX and OpenAI do. A test holds the
two together.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field, RootModel

from lorikeet.router.schemas.openapi_receipt import Receipt

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class MergedAdapters(BaseModel):
    """Several adapters as one, in the words of PEFT's `add_weighted_adapter`."""

    ids: list[str] = Field(min_length=1, max_length=32)
    weights: list[float]
    merge_strategy: Literal["linear", "ties", "dare_linear", "dare_ties", "cat"] | None = "linear"
    density: float | None = Field(None, description="Above 0 and at most 1; for ties, dare_linear and dare_ties")
    majority_sign_method: Literal["total", "frequency"] | None = "total"


class _Speculative(BaseModel):
    """Of every generating route."""

    speculative_tokens: int | None = Field(None, ge=0, description="Tokens guessed per step at most; 0 guesses nothing")
    speculative_method: Literal["auto", "lookup", "ngram", "medusa", "draft", "off"] | None = Field(
        None, description="What guesses; the text is the same with all of them"
    )
    speculative_schedule: Literal["constant", "heuristic", "auto"] | None = Field(
        None, description="How many tokens are guessed: always the bound, by the last step's success, or what pays best"
    )
    speculative_verify: Literal["coupled", "rejection", "google", "deepmind"] | None = Field(
        None,
        description="How a draft model's guesses are verified; with a `seed` always coupled, which keeps the text too",
    )
    heads_id: str | None = Field(
        None, description="An adapter whose Medusa heads guess beside the request's own adapter; named as that is"
    )


class _Parameters(_Speculative):
    adapter_id: str | None = Field(
        None, description="An alias, or `id` or `id@revision` within the source; empty: the default adapter, if any"
    )
    adapter_source: Literal["hub", "local", "s3"] | None = Field(None, description="Default: the server's")
    api_token: str | None = Field(None, description="The source's token; default: that of the Authorization header")
    merged_adapters: MergedAdapters | None = None
    best_of: int | None = Field(None, description="Generates so many texts and returns the likeliest; needs sampling")
    temperature: float | None = Field(None, description="0 is greedy; 0 or 1 alone do not sample")
    repetition_penalty: float | None = Field(None, gt=0)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    top_k: int | None = Field(None, gt=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, lt=1)
    do_sample: bool | None = False
    seed: int | None = Field(None, ge=0, description="The same seed gives the same text, alone or in any company")
    max_new_tokens: int | None = Field(None, gt=0, description="Default: all that is left of max_total_tokens")
    ignore_eos_token: bool | None = False
    stop: list[str] | None = Field(None, description="Ends the text, and stays in it")
    truncate: int | None = Field(None, gt=0, description="Keeps only so many tokens of the end of the prompt")
    return_full_text: bool | None = Field(False, description="Puts the prompt before the text")
    watermark: bool | None = False
    return_k_alternatives: int | None = Field(None, gt=0, description="So many likeliest tokens beside each token")


class GenerateParameters(_Parameters):
    details: bool | None = False
    receipt: bool | None = Field(False, description="Tells what the text follows from, for `lorikeet-replay`")
    decoder_input_details: bool | None = Field(False, description="Log probabilities of the prompt; not when streaming")


class PredictRequest(_Parameters):
    """By default 40 tokens, `top_k` 10, `top_p` 0.9, four guesses a step, and the prompt before the text."""

    prompt: str = Field(min_length=1)


class PredictResponse(RootModel[str]):
    """The text alone."""


class GenerateRequest(BaseModel):
    inputs: str | list[int] = Field(min_length=1, description="A text, or token ids")
    parameters: GenerateParameters | None = None


class CompatGenerateRequest(GenerateRequest):
    stream: bool | None = False


class AlternativeToken(BaseModel):
    id: int
    text: str
    logprob: float | None


class PrefillToken(BaseModel):
    id: int
    text: str
    logprob: float | None


class Token(BaseModel):
    id: int
    text: str
    logprob: float | None
    special: bool
    alternative_tokens: list[AlternativeToken] | None = None
    skipped: bool = Field(description="Emitted by the same step as the token before it")
    source: Literal["prefill", "target", "lookup", "medusa", "draft", "resample", "bonus"] = Field(
        description="prefill: the first; target: of a step without guesses; lookup, medusa, draft: a guess that was "
        "accepted; resample: the target's own where a guess was not; bonus: its own behind guesses that all were"
    )


class SpeculationReport(BaseModel):
    """What guessing ahead gave: `drafted` guesses were verified, `accepted` of them emitted."""

    method: Literal["auto", "lookup", "medusa", "draft"]
    verify: Literal["coupled", "rejection"]
    steps: int
    drafted: int
    accepted: int
    resampled: int
    bonus: int
    draft_seconds: float = Field(description="Proposing, in the steps that verified guesses for this request")
    verify_seconds: float = Field(description="The forward of the model in them")
    accept_seconds: float = Field(description="Sampling and accepting in them")
    sources: dict[str, int] = Field(description="Tokens by their `source`; they add up to `generated_tokens`")


class BestOfSequence(BaseModel):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]


class Details(BaseModel):
    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | None = None
    speculation: SpeculationReport | None = Field(None, description="Where guesses were possible")
    receipt: Receipt | None = Field(None, description="Where asked for")


class GenerateResponse(BaseModel):
    generated_text: str
    details: Details | None = None
    receipt: Receipt | None = Field(None, description="Where it was asked for and there are no details")


class StreamDetails(BaseModel):
    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    speculation: SpeculationReport | None = Field(None, description="Where guesses were possible")
    receipt: Receipt | None = Field(None, description="Where asked for")


class StreamResponse(BaseModel):
    token: Token
    generated_text: str | None
    details: StreamDetails | None
    receipt: Receipt | None = Field(None, description="In the last event, where asked for and there are no details")


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


class StreamOptions(BaseModel):
    include_usage: bool | None = False


class _OpenAIRequest(_Speculative):
    model: str = Field(description="The base model, an adapter's id or an alias")
    temperature: float | None = Field(1.0, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(1.0, ge=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    n: int | None = Field(1, ge=1, le=128)
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = Field(None, description="Ends the text, and is cut off")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    ignore_eos_token: bool | None = False
    receipt: bool | None = Field(False, description="Tells what the text follows from, for `lorikeet-replay`")
    adapter_source: Literal["hub", "local", "s3"] | None = None
    api_token: str | None = None
    prediction: dict[str, Any] | None = Field(None, description='{"type": "content", "content": text to be repeated}')


class CompletionRequest(_OpenAIRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = False
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class ContentPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    role: str
    content: str | list[ContentPart] | None
    name: str | None = None


class ChatCompletionRequest(_OpenAIRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionDetails(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    speculation: SpeculationReport


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: CompletionDetails | None = Field(None, description="Where guesses were possible")


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    receipt: Receipt | None = Field(None, description="Where asked for; of a stream in the last event")


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None


class ChatCompletionResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    receipt: Receipt | None = Field(None, description="Where asked for; of a stream in the last event")


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str | None = Field(None, description="Of an adapter: its id at its source")
    parent: str | None = Field(None, description="Of an adapter: the base model")
    adapter_source: str | None = None
    problem: str | None = Field(None, description="Why an adapter that is listed is not served")


class AdapterName(BaseModel):
    adapter_id: str
    adapter_source: Literal["hub", "local", "s3"] | None = None


class AdapterUnload(AdapterName):
    disk: bool | None = Field(False, description="Its file in the store goes too")


class AdapterRefresh(BaseModel):
    adapter_id: str | None = Field(None, description="Without it: all")
    adapter_source: Literal["hub", "local", "s3"] | None = None


class LoadLora(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = False


class UnloadLora(BaseModel):
    lora_name: str


class AdapterList(BaseModel):
    named: list[dict[str, Any]]
    loaded: list[dict[str, Any]]


class Reloaded(BaseModel):
    num_entries: int
    num_changed: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
