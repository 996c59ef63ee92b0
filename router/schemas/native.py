"""Reader of the bodies of LoRAX's generation routes, with LoRAX's rules in its order and words.

Rules on lengths need the tokenized prompt: they are in `check_lengths`.
"""

# ruff: noqa: RUF009 - `_read_by` is `dataclasses.field`

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from lorikeet.proto.params import MAX_ALTERNATIVES, SamplingParams, ranges
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.adapters import AdapterFields, merge_child, read_merge
from lorikeet.router.schemas.constraints import Constraints, read_constraints
from lorikeet.router.schemas.field_table import Route, Row, misplaced, rejected
from lorikeet.router.schemas.fields import Fields, check_salt
from lorikeet.router.schemas.grammar import GrammarFields, InvalidGrammar, read_grammar
from lorikeet.router.schemas.speculation import SpeculationFields, read_speculation
from lorikeet.router.text.length import TokenLength
from lorikeet.router.text.stop import check_stops


def _read_by(method: Callable[..., Any], *arguments: str, show: bool = True) -> Any:
    """A field of `NativeParameters`, read by a method of `Fields`."""
    return field(repr=show, metadata={"read": lambda fields, name: method(fields, name, *arguments)})


@dataclass(frozen=True)
class NativeParameters:
    """`parameters`, typed but not yet checked. The order of the fields decides which error is reported first."""

    adapter_id: str | None = _read_by(Fields.text)
    heads_id: str | None = _read_by(Fields.text)
    adapter_source: str | None = _read_by(Fields.text)
    api_token: str | None = _read_by(Fields.text, show=False)
    cache_salt: str | None = _read_by(Fields.text)
    merged_adapters: Fields | None = _read_by(lambda fields, _: merge_child(fields))
    best_of: int | None = _read_by(Fields.integer, "usize")
    temperature: float | None = _read_by(Fields.number)
    repetition_penalty: float | None = _read_by(Fields.number)
    frequency_penalty: float | None = _read_by(Fields.number)
    presence_penalty: float | None = _read_by(Fields.number)
    top_p: float | None = _read_by(Fields.number)
    min_p: float | None = _read_by(Fields.number)
    typical_p: float | None = _read_by(Fields.number)
    top_k: int | None = _read_by(Fields.integer, "i32")
    return_k_alternatives: int | None = _read_by(Fields.integer, "i32")
    max_new_tokens: int | None = _read_by(Fields.integer, "u32")
    stop: list[str] = _read_by(lambda fields, _: fields.texts("stop") + fields.texts("stop_sequences"))
    """TGI's client calls it `stop_sequences`."""
    seed: int | None = _read_by(Fields.integer, "u64")
    truncate: int | None = _read_by(Fields.integer, "usize")
    priority: int | None = _read_by(Fields.integer, "i32")
    do_sample: bool = _read_by(Fields.flag)
    return_full_text: bool = _read_by(Fields.flag)
    watermark: bool = _read_by(Fields.flag)
    details: bool = _read_by(Fields.flag)
    receipt: bool = _read_by(Fields.flag)
    decoder_input_details: bool = _read_by(Fields.flag)
    top_n_tokens: int | None = _read_by(Fields.integer, "u32")
    add_special_tokens: bool | None = _read_by(Fields.optional_flag)
    constraints: Constraints = _read_by(lambda fields, _: read_constraints(fields))
    speculation: SpeculationFields = _read_by(lambda fields, _: read_speculation(fields))
    grammar: GrammarFields | InvalidGrammar | None = _read_by(lambda fields, _: _try_grammar(fields))
    """Its error is raised among the other rules."""

    @property
    def heads(self) -> AdapterFields:
        """Adapter fields of `heads_id`; source and token are the adapter's."""
        return AdapterFields(self.heads_id, self.adapter_source, self.api_token, field="heads_id")

    @property
    def wants_sampling(self) -> bool:
        """Whether any sampling field is set, whatever its value, as `best_of` requires."""
        given = (self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p)
        return self.do_sample or any(value is not None for value in given)

    def sampling(self) -> SamplingParams:
        """A temperature of 1 alone does not sample, and one of 0 never does."""
        warps = (
            self.temperature not in (None, 0.0, 1.0)
            or self.top_k is not None
            or (self.top_p is not None and self.top_p < 1.0)
            or (self.min_p is not None and self.min_p > 0.0)
            or self.typical_p is not None
        )
        return SamplingParams(
            do_sample=(self.do_sample or warps) and self.temperature != 0.0,
            temperature=self.temperature or 1.0,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            typical_p=1.0 if self.typical_p is None else self.typical_p,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            watermark=self.watermark,
            logit_bias=self.constraints.logit_bias,
        )


_PARAMETERS = fields(NativeParameters)


@dataclass(frozen=True)
class NativeRequest:
    """The body of `/generate`, `/generate_stream`, `/` and `/invocations`."""

    inputs: str
    parameters: NativeParameters
    stream: bool
    ignored: list[str]
    """Names of fields that are not read."""
    rejected: list[tuple[Row, str]]
    """Fields of `parameters` that are not supported, with their names."""
    misplaced: list[str]
    """Names of fields that belong in `parameters`."""
    input_ids: list[int] | None = None
    """The prompt, where it was given as token ids; `inputs` is empty then."""


def read_native(body: dict[str, Any], *, with_stream: bool) -> NativeRequest:
    """Type the body. Raises WrongJsonType. `stream` is a field of `/` and `/invocations` only."""
    values = Fields(body)
    given = values.text_or_ids("inputs")
    inputs, input_ids = ("", given) if isinstance(given, list) else (given, None)
    child = values.child("parameters")
    parameters = NativeParameters(**{each.name: each.metadata["read"](child, each.name) for each in _PARAMETERS})
    stream = values.flag("stream") if with_stream else False
    unsupported, elsewhere = rejected(child, Route.NATIVE), misplaced(values)
    return NativeRequest(inputs, parameters, stream, values.ignored(), unsupported, elsewhere, input_ids)


def _try_grammar(fields: Fields) -> GrammarFields | InvalidGrammar | None:
    try:
        return read_grammar(fields)
    except ValidationError as error:
        return InvalidGrammar(error.message, error.param, error.code)


def check_rules(request: NativeRequest, config: RouterConfig, *, streaming: bool) -> AdapterFields:
    """The request's adapter fields. Raises ValidationError for the first broken rule."""
    parameters = request.parameters
    if streaming:
        if parameters.best_of not in (None, 1):
            raise ValidationError("`best_of` != 1 is not supported when streaming tokens", "best_of")
        if parameters.decoder_input_details:
            raise ValidationError(
                "`decoder_input_details` == true is not supported when streaming tokens", "decoder_input_details"
            )
    merge = read_merge(parameters.merged_adapters, parameters.adapter_id)
    _check_best_of(parameters, config)
    _check_sampling(parameters)
    check_salt(parameters.cache_salt)
    _check_counts(request, config)
    _check_unknown(request, config)
    return AdapterFields(parameters.adapter_id, parameters.adapter_source, parameters.api_token, merge)


def _check_unknown(request: NativeRequest, config: RouterConfig) -> None:
    """Raises UnsupportedField for a field that would change the text, unless unknown fields are ignored as in LoRAX."""
    ignores = config.unknown_fields == "ignore"
    if isinstance(request.parameters.grammar, ValidationError):
        raise request.parameters.grammar
    for row, name in request.rejected:
        if row.in_lorax or not ignores:
            raise row.error(name)
    if request.misplaced and not ignores:
        raise UnsupportedField(request.misplaced[0], "belongs in `parameters`")


def _check_best_of(parameters: NativeParameters, config: RouterConfig) -> None:
    best_of = parameters.best_of
    if best_of is None or best_of == 1:
        return
    if best_of > 1 and not parameters.wants_sampling:
        raise ValidationError("you must use sampling when `best_of` is > 1", "best_of")
    if best_of > 1 and parameters.seed is not None:
        raise ValidationError("`seed` must not be set when `best_of` > 1", "seed")
    if config.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint", "best_of")
    if best_of < 1 or best_of > config.max_best_of:
        raise ValidationError(f"`best_of` must be > 0 and <= {config.max_best_of}. Given: {best_of}", "best_of")


def _check_sampling(parameters: NativeParameters) -> None:
    for name, is_valid, rule in _SAMPLING_RULES:
        value = getattr(parameters, name)
        if value is not None and not is_valid(value):
            raise ValidationError(f"`{name}` must be {rule}", name)


_RANGES = ranges(SamplingParams)
_SAMPLING_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value >= 0.0, "non-negative"),
    ("repetition_penalty", lambda value: value > 0.0, "strictly positive"),
    ("repetition_penalty", _RANGES["repetition_penalty"].__contains__, str(_RANGES["repetition_penalty"])),
    ("frequency_penalty", _RANGES["frequency_penalty"].__contains__, ">= -2.0 and <= 2.0"),
    ("presence_penalty", _RANGES["presence_penalty"].__contains__, ">= -2.0 and <= 2.0"),
    ("top_p", lambda value: 0.0 < value <= 1.0, "> 0.0 and < 1.0"),
    ("min_p", _RANGES["min_p"].__contains__, ">= 0.0 and <= 1.0"),
    ("typical_p", lambda value: 0.0 < value < 1.0, "> 0.0 and < 1.0"),
    ("top_k", lambda value: value > 0, "strictly positive"),
    ("return_k_alternatives", lambda value: value > 0, "strictly positive"),
    ("return_k_alternatives", lambda value: value <= MAX_ALTERNATIVES, f"<= {MAX_ALTERNATIVES}"),
    ("top_n_tokens", lambda value: value <= MAX_ALTERNATIVES, f"<= {MAX_ALTERNATIVES}"),
)


def _check_counts(request: NativeRequest, config: RouterConfig) -> None:
    parameters = request.parameters
    if parameters.max_new_tokens == 0:
        raise ValidationError("`max_new_tokens` must be strictly positive", "max_new_tokens")
    check_stops(parameters.stop, config.max_stop_sequences)
    if not request.inputs and request.input_ids is None:
        raise ValidationError("`inputs` cannot be empty", "inputs")
    if parameters.return_full_text and request.input_ids is not None:
        raise ValidationError("`return_full_text` needs `inputs` as a text", "return_full_text")
    truncate = parameters.truncate
    if truncate is not None and not 0 < truncate <= config.max_input_length:
        raise ValidationError(
            f"`truncate` must be strictly positive and less than {config.max_input_length}. Given: {truncate}",
            "truncate",
        )


def check_text(inputs: str, length: TokenLength, config: RouterConfig) -> None:
    """Raises ValidationError for a text that must have too many tokens, before it is tokenized."""
    least = length.least_tokens([inputs], config.max_input_length)
    if least > config.max_input_length:
        raise ValidationError(
            f"`inputs` must have less than {config.max_input_length} tokens. Given: at least {least}", "inputs"
        )


def check_lengths(num_inputs: int, max_new_tokens: int | None, config: RouterConfig) -> int:
    """The maximum number of tokens to generate. Raises ValidationError when prompt and output don't fit."""
    allowed = max_new_tokens
    if allowed is None:
        total = min(config.default_total_tokens or config.max_total_tokens, config.max_total_tokens)
        if total <= num_inputs < config.max_total_tokens:
            raise ValidationError(
                f"`inputs` has {num_inputs} tokens: give `max_new_tokens`. Without it, `inputs` and output have at "
                f"most {total} tokens",
                "max_new_tokens",
            )
        allowed = max(total - num_inputs, 0)
    if num_inputs + allowed > config.max_total_tokens:
        raise ValidationError(
            f"`inputs` tokens + `max_new_tokens` must be <= {config.max_total_tokens}. "
            f"Given: {num_inputs} `inputs` tokens and {allowed} `max_new_tokens`"
        )
    if num_inputs > config.max_input_length:
        raise ValidationError(f"`inputs` must have less than {config.max_input_length} tokens. Given: {num_inputs}")
    if allowed == 0:
        raise ValidationError("`max_new_tokens` must be strictly positive")
    return allowed
