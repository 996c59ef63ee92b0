"""The bodies of OpenAI's generation routes, with OpenAI's rules; LoRAX's and vLLM's fields keep their meaning.

Ranges of token ids are not checked here but in `check_ids` (`api/prepare.py`), which knows the vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from lorikeet.proto.params import MAX_ALTERNATIVES, LogprobParams
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.chat import NO_TOOLS, Conversation, ConversationGroup, ToolFields, ToolGroup
from lorikeet.router.schemas.generation import (
    GenerationGroup,
    Prediction,
    PromptOnlyGroup,
    ReportGroup,
    RequestFields,
    token_ids,
)
from lorikeet.router.schemas.model import (
    F32,
    I32,
    U32,
    Body,
    Ignored,
    Missing,
    Rejected,
    Rule,
    Texts,
    are_token_ids,
    published_as,
)
from lorikeet.router.text.stop import check_stops
from lorikeet.router.text.tokenizer import TokenLength

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 20
MAX_STOPS = 64
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


@dataclass(frozen=True)
class PromptFields:
    """How a prompt becomes token ids."""

    add_special_tokens: bool
    num_kept: int | None
    """How many tokens are kept; None for all, -1 for as many as a prompt may have."""
    keeps_first: bool
    """Whether the first tokens are kept, instead of the last."""

    @property
    def keeps_last(self) -> bool:
        """Whether only the end of the prompt is kept."""
        return self.num_kept is not None and not self.keeps_first

    def most(self, max_input_length: int) -> int | None:
        """How many tokens are kept; None for all."""
        return max_input_length if self.num_kept == -1 else self.num_kept

    def cut(self, ids: list[int], max_input_length: int) -> list[int]:
        """The tokens that are kept."""
        num_kept = self.most(max_input_length)
        if num_kept is None or num_kept >= len(ids):
            return ids
        return ids[:num_kept] if self.keeps_first else ids[len(ids) - num_kept :]


@dataclass(frozen=True)
class ReportFields:
    """What an answer contains in addition to its choices."""

    tokens: bool
    """LoRAX's `details`: whether each choice lists its tokens, as `/generate` does."""
    token_ids: bool
    tokens_as_ids: bool
    """Whether tokens in `logprobs` are written as `token_id:<id>`."""
    num_prompt_logprobs: int | None
    """Likeliest tokens at each position of the prompt; None for no log probabilities of the prompt."""
    logprob_token_ids: tuple[int, ...]
    """Tokens whose log probabilities are listed at each position of the output, in place of the likeliest."""
    usage: bool
    """Whether a stream ends with the usage."""
    continuous_usage: bool
    """Whether every event of a stream has the usage so far."""
    metadata: dict[str, str] | None
    """The client's own, which the answer repeats."""
    service_tier: str | None
    """The client's wish; there is one tier."""


@dataclass(frozen=True, kw_only=True)
class OpenAIRequest:
    """What both routes do."""

    fields: RequestFields
    prompt: PromptFields
    report: ReportFields
    num_choices: int
    max_tokens: int | None
    stream: bool
    request_id: str | None
    """The client's name for the request."""
    num_logprobs: int | None
    """Alternatives per token; None for no logprobs at all, 0 for those of the tokens only."""
    ignored: list[str]
    echo: bool = False

    @property
    def best_of(self) -> int:
        """Sequences per prompt."""
        return self.fields.num_sequences

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is scored and nothing is generated."""
        return self.fields.is_probe

    @property
    def lists_alternatives(self) -> bool:
        """Whether other tokens are listed with each token."""
        return bool(self.num_logprobs or self.report.logprob_token_ids)


@dataclass(frozen=True, kw_only=True)
class CompletionFields(OpenAIRequest):
    """What `/v1/completions` does."""

    prompts: list[str | list[int]]
    suffix: str = ""
    """What follows the output; "" for nothing."""


@dataclass(frozen=True, kw_only=True)
class ChatFields(OpenAIRequest):
    """What `/v1/chat/completions` does."""

    conversation: Conversation
    tools: ToolFields = NO_TOOLS


def _check_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    if len(metadata) > MAX_METADATA:
        raise ValidationError(f"`metadata` may have up to {MAX_METADATA} keys. Given: {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
            raise ValidationError(
                f"`metadata` has keys of up to {MAX_METADATA_KEY} characters, and texts of up to {MAX_METADATA_VALUE}",
                "metadata",
            )
    return metadata


def _use(instead: str) -> str:
    return f"is not supported by this route: use {instead}"


_NO_FIELD = "is no field: put its fields at the top level"


class StreamOptions(Body):
    """OpenAI's options of streams."""

    include_usage: bool = Field(False, description="The stream ends with the usage")
    continuous_usage_stats: bool = Field(False, description="Counts of tokens in every event; needs `include_usage`")
    include_obfuscation = Ignored()


class PromptTokensGroup(Body):
    """vLLM's fields about the tokens of a prompt."""

    truncate_prompt_tokens: I32 | None = Field(
        None, description="Keeps only this number of tokens of the prompt; -1: as many as a prompt may have"
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Where tokens are removed")

    add_special_tokens: bool = Field(True, description="Whether the tokenizer's special tokens are added")

    def prompt_fields(self, max_input_length: int) -> PromptFields:
        """Raises ValidationError."""
        limit = self.truncate_prompt_tokens
        if limit is not None and not (limit == -1 or 0 < limit <= max_input_length):
            rule = f"must be strictly positive and <= {max_input_length}, or -1"
            raise ValidationError(f"`truncate_prompt_tokens` {rule}. Given: {limit}", "truncate_prompt_tokens")
        return PromptFields(self.add_special_tokens, limit, self.truncation_side == "right")


class OpenAIGroup(PromptTokensGroup, ReportGroup, GenerationGroup):
    """Fields of both generation routes."""

    model: Annotated[str, Missing("you must provide a model parameter")] = Field(
        description="The base model, an adapter's id or an alias"
    )
    temperature: F32 = Field(1.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: F32 = Field(1.0, ge=0.0, le=1.0)
    typical_p: F32 = Field(1.0, gt=0.0, le=1.0)
    top_k: Annotated[I32, Rule("must be strictly positive, or 0 or -1 for none")] = Field(0, ge=-1)
    do_sample: bool = Field(True, description="False is greedy")
    n: U32 = Field(1, ge=1, le=MAX_CHOICES)
    max_completion_tokens: U32 | None = None
    max_tokens: U32 | None = Field(None, description="The older name of `max_completion_tokens`")
    seed: int | None = None
    stop: str | Texts = Field(default_factory=list, description="Ends the text, which excludes it")
    stream: bool = False
    stream_options: StreamOptions | None = Field(None, description="Needs `stream`")
    user: str | None = Field(None, description="Always gets the same version of a roll-out")
    metadata: Annotated[dict[str, Any], AfterValidator(_check_metadata)] | None = Field(
        None, description=f"Up to {MAX_METADATA} texts, which the answer repeats"
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="The answer has `default`: there is one tier"
    )
    prompt_logprobs: I32 | None = Field(
        None, ge=0, le=MAX_PROMPT_LOGPROBS, description="Of the prompt; not when streaming"
    )
    logprob_token_ids: Annotated[tuple[int, ...], token_ids(MAX_ALTERNATIVES)] = Field(
        (), description="Needs `logprobs`: tokens that are listed in place of the likeliest, at most "
        f"{MAX_ALTERNATIVES}, as in vLLM"
    )  # fmt: skip
    return_token_ids: bool = Field(False, description="Adds `prompt_token_ids` and `token_ids`")
    return_tokens_as_token_ids: bool = Field(False, description="Writes tokens in `logprobs` as `token_id:<id>`")
    request_id: Annotated[str, Rule("must be 1 to 128 letters, digits or any of ._:-")] | None = Field(
        None,
        pattern="^[A-Za-z0-9._:-]{1,128}$",
        description="The end of the answer's `id`, and `x-request-id` without that header; default: a random one",
    )
    prediction: Prediction | None = Field(None, description="A text that the output may repeat")

    truncate = Rejected(_use("`truncate_prompt_tokens`"))
    max_new_tokens = Rejected(_use("`max_tokens`"))
    stop_sequences = Rejected(_use("`stop`"), ([],))
    watermark = Rejected("is applied by /generate", (False,))
    top_n_tokens = Rejected(_use("`logprobs`"), (0,))
    extra_body = parameters = sampling_params = Rejected(_NO_FIELD, ({},))
    decoder_input_details = return_k_alternatives = return_full_text = Ignored()

    def limit(self) -> int | None:
        """Tokens of the output. Raises ValidationError."""
        limit, older = self.max_completion_tokens, self.max_tokens
        if limit is not None and older is not None and limit != older:
            raise ValidationError("`max_tokens` and `max_completion_tokens` cannot both be set", "max_tokens")
        return older if limit is None else limit

    def common(
        self,
        config: RouterConfig,
        *,
        max_tokens: int | None,
        num_logprobs: int | None,
        num_sequences: int | None = None,
        echo: bool = False,
    ) -> dict[str, Any]:
        """Arguments of OpenAIRequest, checked. Raises ValidationError."""
        adapter = self.adapter_or(self.model, config.model_names, self.user)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        check_stops(stop, MAX_STOPS)
        if "" in stop:
            raise ValidationError("`stop` must not contain an empty string", "stop")
        if self.logprob_token_ids and num_logprobs is None:
            raise ValidationError("`logprob_token_ids` needs `logprobs`", "logprob_token_ids")
        report = self.report()
        fields = RequestFields(
            adapter=adapter,
            heads=replace(self.heads(), user=self.user),
            sampling=self.sampled(do_sample=self.do_sample),
            logprobs=self._logprob_params(num_logprobs, echo=echo),
            num_sequences=num_sequences or self.n,
            seed=None if self.seed is None else self.seed % 2**64,  # OpenAI's may be negative
            stop=stop,
            include_stop=False,
            constraints=self.constraints(),
            speculation=self.speculation_fields(
                self.heads_id, None if self.prediction is None else self.prediction.read_text()
            ),
            grammar=self.grammar_fields(),
            cache_salt=self.cache_salt,
            priority=self.priority,
            receipt=self.receipt,
            is_probe=max_tokens == 0,
        )
        self.check_supported()
        return {
            "fields": fields,
            "prompt": self.prompt_fields(config.max_input_length),
            "report": report,
            "num_choices": self.n,
            "max_tokens": max_tokens,
            "stream": self.stream,
            "request_id": self.request_id,
            "num_logprobs": num_logprobs,
            "ignored": self.ignored(),
            "echo": echo,
        }

    def _logprob_params(self, num_logprobs: int | None, *, echo: bool) -> LogprobParams:
        count, num_prompt = num_logprobs or 0, self.prompt_logprobs
        return LogprobParams(
            wanted=True,
            alternatives=len(self.logprob_token_ids) or count,
            alternative_ids=self.logprob_token_ids,
            raw=True,
            prefill=num_prompt is not None or (echo and num_logprobs is not None),
            prefill_alternatives=max(count if echo else 0, num_prompt or 0),
            prefill_ranks=num_prompt is not None,
        )

    def report(self) -> ReportFields:
        """Raises ValidationError."""
        if self.prompt_logprobs is not None and self.stream:
            raise ValidationError("`prompt_logprobs` is not supported when streaming tokens", "prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise ValidationError("`stream_options` needs `stream` to be true", "stream_options")
        options = self.stream_options or _NO_OPTIONS
        if options.continuous_usage_stats and not options.include_usage:
            raise ValidationError("`stream_options.continuous_usage_stats` needs `include_usage`", "stream_options")
        return ReportFields(
            self.details,
            self.return_token_ids,
            self.return_tokens_as_token_ids,
            self.prompt_logprobs,
            self.logprob_token_ids,
            options.include_usage,
            options.continuous_usage_stats,
            self.metadata,
            self.service_tier,
        )


_NO_OPTIONS = StreamOptions.read({})


class CompletionRequest(PromptOnlyGroup, OpenAIGroup):
    """The body of `/v1/completions`."""

    prompt: Annotated[Any, published_as(str | list[str] | list[int] | list[list[int]])] = None
    echo: bool = False
    best_of: U32 | None = None
    logprobs: U32 | None = Field(None, le=MAX_TOP_LOGPROBS)
    suffix: str = Field(
        "", description="What follows the output; needs a tokenizer with fill-in-the-middle tokens, and texts as "
        "`prompt`"
    )  # fmt: skip
    top_logprobs = Ignored("`logprobs` is the number")

    def to_request(self, config: RouterConfig) -> CompletionFields:
        """Raises ValidationError."""
        prompt = self.prompt_fields(config.max_input_length)
        prompts = _prompts(self.prompt, prompt, config)
        if self.suffix and (self.echo or prompt.num_kept is not None or not all(isinstance(p, str) for p in prompts)):
            sentence = "`suffix` needs texts as `prompt`, without `echo` and `truncate_prompt_tokens`"
            raise ValidationError(sentence, "suffix")
        limit = self.limit()
        if limit == 0 and not self.echo:
            raise ValidationError("`max_tokens` must be strictly positive", "max_tokens")
        if limit == 0 and self.receipt:
            raise UnsupportedField("receipt", "is of a text, and `max_tokens` is 0")
        num_sequences = self._num_sequences(config)
        check_num_sequences(len(prompts) * num_sequences, config)
        common = self.common(
            config,
            max_tokens=16 if limit is None else limit,
            num_logprobs=self.logprobs,
            num_sequences=num_sequences,
            echo=self.echo,
        )
        return CompletionFields(**common, prompts=prompts, suffix=self.suffix)

    def _num_sequences(self, config: RouterConfig) -> int:
        """Sequences per prompt. Raises ValidationError."""
        if self.best_of is None:
            return self.n
        if self.best_of < self.n:
            raise ValidationError("`best_of` must be >= `n`", "best_of")
        if self.best_of > self.n and self.stream:
            raise ValidationError("`best_of` above `n` is not supported when streaming tokens", "best_of")
        limit = max(config.max_best_of, self.n)
        if self.best_of > limit:
            raise ValidationError(f"`best_of` must be > 0 and <= {limit}. Given: {self.best_of}", "best_of")
        return self.best_of


class ChatCompletionRequest(ConversationGroup, ToolGroup, OpenAIGroup):
    """The body of `/v1/chat/completions`."""

    logprobs: bool = False
    top_logprobs: U32 | None = Field(None, le=MAX_TOP_LOGPROBS, description="Needs `logprobs`, unless it is 0")
    add_special_tokens: bool = Field(
        False, description="Whether the tokenizer's special tokens are added, which most chat templates write"
    )
    echo = Rejected("is applied by /v1/completions", (False,))
    suffix = Rejected("is applied by /v1/completions", ("",))
    best_of = Rejected("is applied by /v1/completions", (1,))

    def to_request(self, config: RouterConfig) -> ChatFields:
        """Raises ToolError or ValidationError."""
        conversation, tools = self.conversation(config), self.tool_fields()
        limit = self.limit()
        if limit == 0:
            raise ValidationError("`max_tokens` must be strictly positive", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise ValidationError("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
        check_num_sequences(self.n, config)
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        common = self.common(config, max_tokens=limit, num_logprobs=num_logprobs)
        return ChatFields(**common, conversation=conversation, tools=tools)


def check_texts(texts: list[str], length: TokenLength, config: RouterConfig, field: str) -> None:
    """Raises ValidationError for texts that together must have too many tokens, before they are tokenized."""
    least = length.least_tokens(texts, config.max_input_length)
    if least > config.max_input_length:
        raise ValidationError(
            f"a prompt may have {config.max_input_length} tokens of the maximum context length of "
            f"{config.max_total_tokens}. Given: at least {least}",
            field,
            "context_length_exceeded",
        )


def check_lengths(num_prompt: int, max_tokens: int | None, config: RouterConfig) -> int:
    """The maximum number of tokens to generate. Raises ValidationError when prompt and output don't fit."""
    allowed = config.max_total_tokens - num_prompt if max_tokens is None else max_tokens
    if num_prompt > config.max_input_length or allowed < 1:
        raise _too_long(num_prompt, config)
    if num_prompt + allowed > config.max_total_tokens:
        raise ValidationError(
            f"prompt and `max_tokens` must fit the maximum context length of {config.max_total_tokens} tokens. "
            f"Given: {num_prompt} in the prompt and {allowed} as `max_tokens`",
            "max_tokens",
            "context_length_exceeded",
        )
    return allowed


def _too_long(num_prompt: int, config: RouterConfig) -> ValidationError:
    return ValidationError(
        f"a prompt may have {config.max_input_length} tokens of the maximum context length of "
        f"{config.max_total_tokens}. Given: {num_prompt}",
        code="context_length_exceeded",
    )


def check_num_sequences(num_sequences: int, config: RouterConfig) -> None:
    """Raises ValidationError."""
    if num_sequences > config.max_sequences:
        raise ValidationError(f"prompts times choices must be <= {config.max_sequences}. Given: {num_sequences}", "n")


def _prompts(value: Any, prompt: PromptFields, config: RouterConfig) -> list[str | list[int]]:
    """A text, texts, token ids, or lists of token ids: always as a list of prompts. Lengths before elements.

    A list of token ids holds only those that are kept.
    """
    most = config.max_input_length
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if not isinstance(value[0], int):
            check_num_sequences(len(value), config)
        elif len(value := prompt.cut(value, most)) > most:
            raise _too_long(len(value), config)
        if all(isinstance(item, str) for item in value):
            return value
        if are_token_ids(value):
            return [value]
        if all(isinstance(item, list) and are_token_ids(item) for item in value):
            return [prompt.cut(item, most) for item in value]
    raise ValidationError("`prompt` must be a string, strings, token ids, or lists of token ids", "prompt")
