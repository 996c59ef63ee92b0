"""Readers of the bodies of OpenAI's generation routes, with OpenAI's rules; LoRAX's extra fields keep their meaning.

Ranges of token ids are not checked here but in `Service.check_ids`, which knows the vocabulary.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from lorikeet.proto.params import SamplingParams, ranges
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.adapters import BASE_NAMES, AdapterFields, merge_child, read_merge
from lorikeet.router.schemas.chat.messages import Conversation, read_conversation
from lorikeet.router.schemas.chat.tools import NO_TOOLS, ToolFields, read_tools
from lorikeet.router.schemas.constraints import Constraints, read_constraints
from lorikeet.router.schemas.field_table import Route, check_unread
from lorikeet.router.schemas.fields import Fields, are_token_ids, check_salt
from lorikeet.router.schemas.grammar import GrammarFields, read_grammar
from lorikeet.router.schemas.report import ReportFields, read_report_fields
from lorikeet.router.schemas.speculation import SpeculationFields, check_speculation, read_prediction, read_speculation
from lorikeet.router.schemas.vllm import PromptFields, read_prompt_fields
from lorikeet.router.text.length import TokenLength
from lorikeet.router.text.stop import check_stops

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True)
class CommonFields:
    """What both routes share."""

    adapter: AdapterFields
    heads: AdapterFields
    """Adapter fields of `heads_id`; source and token are the adapter's."""
    sampling: SamplingParams
    num_choices: int
    max_tokens: int | None
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    constraints: Constraints
    prompt: PromptFields
    report: ReportFields
    receipt: bool
    speculation: SpeculationFields
    grammar: GrammarFields | None
    request_id: str | None
    """The client's name for the request."""
    cache_salt: str | None
    """Requests share cached prefixes only under equal ones."""
    priority: int


@dataclass(frozen=True)
class OpenAIRequest:
    """What the bodies of both routes have in common."""

    common: CommonFields
    num_logprobs: int | None
    """Alternatives per token; None for no logprobs at all, 0 for those of the tokens alone."""
    best_of: int
    """Sequences per prompt."""
    ignored: list[str]
    echo: bool = False
    only_prompt: bool = False
    """Whether the prompt is scored and nothing is generated."""

    @property
    def lists_alternatives(self) -> bool:
        """Whether other tokens are listed with each token."""
        return bool(self.num_logprobs or self.common.report.logprob_token_ids)


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(OpenAIRequest):
    """The body of `/v1/completions`."""

    prompts: list[str | list[int]]
    suffix: str = ""
    """What follows the output; "" for nothing."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest(OpenAIRequest):
    """The body of `/v1/chat/completions`."""

    conversation: Conversation
    tools: ToolFields = NO_TOOLS


def read_completion(body: dict[str, Any], config: RouterConfig) -> CompletionRequest:
    """Type and check. Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    model = _model(fields)
    prompt = read_prompt_fields(fields, config.max_input_length, add_special_tokens=True)
    prompts = _prompts(fields.take("prompt"), prompt, config)
    echo, suffix = fields.flag("echo"), fields.text("suffix") or ""
    if suffix and (echo or prompt.num_kept is not None or not all(isinstance(each, str) for each in prompts)):
        raise ValidationError("`suffix` needs texts as `prompt`, without `echo` and `truncate_prompt_tokens`", "suffix")
    max_tokens = _max_tokens(fields)
    num_logprobs = _num_logprobs(fields, "logprobs")
    common = _common(fields, config, model, 16 if max_tokens is None else max_tokens, prompt)
    _check_logprobs(common, num_logprobs)
    if max_tokens == 0 and not echo:
        raise ValidationError("`max_tokens` must be strictly positive", "max_tokens")
    if max_tokens == 0 and common.receipt:
        raise UnsupportedField("receipt", "is of a text, and `max_tokens` is 0")
    best_of = _best_of(fields, common, config)
    _check_num_sequences(len(prompts) * best_of, config)
    check_unread(fields, Route.COMPLETIONS)
    return CompletionRequest(
        common, num_logprobs, best_of, fields.ignored(), echo, max_tokens == 0, prompts=prompts, suffix=suffix
    )


def read_chat(body: dict[str, Any], config: RouterConfig) -> ChatRequest:
    """Type and check. Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    model = _model(fields)
    conversation, tools = read_conversation(fields, config), read_tools(fields)
    limit = _max_tokens(fields)
    if limit == 0:
        raise ValidationError("`max_tokens` must be strictly positive", "max_tokens")
    wants_logprobs = fields.flag("logprobs")
    top = _num_logprobs(fields, "top_logprobs")
    if top and not wants_logprobs:
        raise ValidationError("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    # The template writes every special token itself.
    prompt = read_prompt_fields(fields, config.max_input_length, add_special_tokens=False)
    common = _common(fields, config, model, limit, prompt)
    _check_num_sequences(common.num_choices, config)
    num_logprobs = (top or 0) if wants_logprobs else None
    _check_logprobs(common, num_logprobs)
    check_unread(fields, Route.CHAT)
    ignored = fields.ignored()
    return ChatRequest(common, num_logprobs, common.num_choices, ignored, conversation=conversation, tools=tools)


def _max_tokens(fields: Fields) -> int | None:
    """`max_completion_tokens`, or its older name."""
    given, older = fields.integer("max_completion_tokens", "u32"), fields.integer("max_tokens", "u32")
    if given is not None and older is not None and given != older:
        raise ValidationError("`max_tokens` and `max_completion_tokens` cannot both be set", "max_tokens")
    return older if given is None else given


def _check_logprobs(common: CommonFields, num_logprobs: int | None) -> None:
    if common.report.logprob_token_ids and num_logprobs is None:
        raise ValidationError("`logprob_token_ids` needs `logprobs`", "logprob_token_ids")


def _num_logprobs(fields: Fields, name: str) -> int | None:
    count = fields.integer(name, "u32")
    if count is not None and count > MAX_TOP_LOGPROBS:
        raise ValidationError(f"`{name}` must be <= {MAX_TOP_LOGPROBS}. Given: {count}", name)
    return count


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


def _model(fields: Fields) -> str:
    """The base model, an adapter or an alias; empty for the default adapter, as on LoRAX's routes."""
    model = fields.text("model")
    if model is None:
        raise ValidationError("you must provide a model parameter", "model")
    return model


def _common(
    fields: Fields, config: RouterConfig, model: str, max_tokens: int | None, prompt: PromptFields
) -> CommonFields:
    adapter = read_adapter(fields, config, model)
    heads = replace(adapter, name=fields.text("heads_id"), merge=None, is_model=False, field="heads_id")
    num_choices = fields.integer("n", "u32")
    if num_choices is not None and not 1 <= num_choices <= MAX_CHOICES:
        raise ValidationError(f"`n` must be >= 1 and <= {MAX_CHOICES}. Given: {num_choices}", "n")
    stop = tuple(fields.text_or_texts("stop"))
    check_stops(stop, MAX_STOPS)
    if "" in stop:
        raise ValidationError("`stop` must not contain an empty string", "stop")
    speculation = replace(read_speculation(fields), prediction=read_prediction(fields))
    check_speculation(speculation, config.speculative_tokens_max)
    stream, request_id = fields.flag("stream"), fields.text("request_id")
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise ValidationError("`request_id` must be 1 to 128 letters, digits or any of ._:-", "request_id")
    constraints = read_constraints(fields)
    return CommonFields(
        adapter=adapter,
        heads=heads,
        sampling=replace(_sampling(fields), logit_bias=constraints.logit_bias),
        num_choices=num_choices or 1,
        max_tokens=max_tokens,
        seed=_seed(fields),
        stop=stop,
        stream=stream,
        constraints=constraints,
        prompt=prompt,
        report=read_report_fields(fields, stream=stream),
        receipt=fields.flag("receipt"),
        speculation=speculation,
        grammar=read_grammar(fields),
        request_id=request_id,
        cache_salt=check_salt(fields.text("cache_salt")),
        priority=fields.integer("priority", "i32") or 0,
    )


def read_adapter(fields: Fields, config: RouterConfig, model: str) -> AdapterFields:
    """By LoRAX's fields if they are set, else by `model`. Raises ValidationError where two different ones are named."""
    name, merged = fields.text("adapter_id"), merge_child(fields)
    source, token, user = fields.text("adapter_source"), fields.text("api_token"), fields.text("user")
    merge = read_merge(merged, name or None)
    if not name and merge is None:
        return AdapterFields(model, source, token, is_model=True, user=user)
    if model not in ("", name, *config.model_names, *BASE_NAMES):
        given = "merged_adapters" if merge is not None else "adapter_id"
        raise ValidationError(f"`model` must be the base model, since `{given}` names the adapter", "model")
    return AdapterFields(name, source, token, merge, user=user)


def _sampling(fields: Fields) -> SamplingParams:
    """Samples at temperature 1 by default; 0 is greedy."""
    temperature = _within(fields, "temperature", 0.0, 2.0, 1.0)
    samples = fields.optional_flag("do_sample")
    top_p = _within(fields, "top_p", 0.0, 1.0, 1.0)
    typical_p, repetition_penalty = fields.number("typical_p"), fields.number("repetition_penalty")
    if typical_p is not None and not 0.0 < typical_p <= 1.0:
        raise ValidationError("`typical_p` must be > 0.0 and <= 1.0", "typical_p")
    if repetition_penalty is not None and repetition_penalty <= 0.0:
        raise ValidationError("`repetition_penalty` must be strictly positive", "repetition_penalty")
    allowed = ranges(SamplingParams)["repetition_penalty"]
    if repetition_penalty is not None and repetition_penalty not in allowed:
        raise ValidationError(f"`repetition_penalty` must be {allowed}", "repetition_penalty")
    top_k = fields.integer("top_k", "i32")
    if top_k is not None and top_k < -1:
        raise ValidationError("`top_k` must be strictly positive, or 0 or -1 for none", "top_k")
    return SamplingParams(
        do_sample=temperature > 0.0 and samples is not False,
        temperature=temperature or 1.0,
        # The empty nucleus keeps the likeliest token.
        top_k=1 if top_p == 0.0 else max(top_k or 0, 0),
        top_p=top_p or 1.0,
        min_p=_within(fields, "min_p", 0.0, 1.0, 0.0),
        typical_p=1.0 if typical_p is None else typical_p,
        repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
        frequency_penalty=_within(fields, "frequency_penalty", -2.0, 2.0, 0.0),
        presence_penalty=_within(fields, "presence_penalty", -2.0, 2.0, 0.0),
    )


def _within(fields: Fields, name: str, low: float, high: float, default: float) -> float:
    value = fields.number(name)
    if value is not None and not low <= value <= high:
        raise ValidationError(f"`{name}` must be >= {low} and <= {high}", name)
    return default if value is None else value


def _seed(fields: Fields) -> int | None:
    """Modulo 2^64, since OpenAI's seeds may be negative."""
    value = fields.take("seed")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValidationError("`seed` must be an integer", "seed")
    return value % 2**64


def _best_of(fields: Fields, common: CommonFields, config: RouterConfig) -> int:
    best_of = fields.integer("best_of", "u32")
    if best_of is None:
        return common.num_choices
    if best_of < common.num_choices:
        raise ValidationError("`best_of` must be >= `n`", "best_of")
    if best_of > common.num_choices and common.stream:
        raise ValidationError("`best_of` above `n` is not supported when streaming tokens", "best_of")
    limit = max(config.max_best_of, common.num_choices)
    if best_of > limit:
        raise ValidationError(f"`best_of` must be > 0 and <= {limit}. Given: {best_of}", "best_of")
    return best_of


def _check_num_sequences(num_sequences: int, config: RouterConfig) -> None:
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
            _check_num_sequences(len(value), config)
        elif len(value := prompt.cut(value, most)) > most:
            raise _too_long(len(value), config)
        if all(isinstance(item, str) for item in value):
            return value
        if are_token_ids(value):
            return [value]
        if all(isinstance(item, list) and are_token_ids(item) for item in value):
            return [prompt.cut(item, most) for item in value]
    raise ValidationError("`prompt` must be a string, strings, token ids, or lists of token ids", "prompt")
