"""What the bodies of all generation routes have in common, and what the bodies of all routes to the model become.

Speculation never changes the distribution of a text, so nothing of its fields is about sampling.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo

from lorikeet.proto.draft_sources import methods
from lorikeet.proto.params import (
    ALL_HEADS,
    LOGIT_BIAS_RANGE,
    NO_SPECULATION,
    LogprobParams,
    Method,
    Pooling,
    SamplingParams,
    Schedule,
    Speculation,
    Verification,
    ranges,
)
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import UnsupportedField, ValidationError, WrongJsonType
from lorikeet.router.schemas.adapters import BASE_NAMES, AdapterFields, GeneratingAdapterGroup
from lorikeet.router.schemas.grammar import GrammarFields, StructuredGroup
from lorikeet.router.schemas.model import (
    F32,
    I32,
    U32,
    Body,
    Ignored,
    OneOf,
    Rejected,
    Rule,
    Texts,
    are_token_ids,
    fail_fast,
    published_as,
)

_ALIASES = {"lookup": ("ngram",)}
METHODS = {name: method for method in methods() for name in (method, *_ALIASES.get(method, ()))}
SCHEDULES = ("constant", "heuristic", "auto")
VERIFICATIONS = {"shared-noise": "shared-noise", **dict.fromkeys(("rejection", "google", "deepmind"), "rejection")}
"""Google's and DeepMind's papers have the same rule (Leviathan et al. 2023; Chen et al. 2023)."""
DEPRECATED_VALUES = {"coupled": "shared-noise"}
DEPRECATED_FIELDS = {"speculative_verify": "speculative_verification"}
DEFAULT_TOKENS = 3
"""Draft tokens where a request names a method, and neither it nor the server a number."""
PREDICTED_TOKENS = 8
"""Draft tokens of a request with a `prediction`, where neither it nor the server has a number."""
DRAFT_MODEL_TOKENS = 4
"""The server's default where it has a draft model."""


@dataclass(frozen=True)
class SpeculationFields:
    """Typed, not yet checked."""

    num_tokens: int | None = None
    method: str | None = None
    schedule: str | None = None
    verification: str | None = None
    names_heads: bool = False
    """Whether there is a `heads_id`."""
    prediction: str | None = None
    """OpenAI's field: a text that the output may repeat."""
    history: bool | None = None
    """Whether the outputs of earlier requests are proposed."""

    @property
    def needs_heads(self) -> bool:
        """Whether the request asks for Medusa heads by name, and fails without them."""
        return self.method == "medusa"


@dataclass(frozen=True)
class SpeculationOffer:
    """What the server supports, and its defaults."""

    num_tokens: int
    """0 for none."""
    max_tokens: int
    method: str
    schedule: str
    verification: str
    has_draft_model: bool
    has_history: bool = False
    """Whether shards can propose earlier outputs."""
    history: bool = False
    """Whether shards propose earlier outputs by default."""


def make_offer(config: RouterConfig, shards_draft_model: str = "", has_history: bool = True) -> SpeculationOffer:
    """`shards_draft_model` is the draft model that a shard reports, "" for none; `has_history` is reported too."""
    has_draft_model = bool(config.draft_model_id or shards_draft_model)
    num_tokens = config.speculative_tokens
    if num_tokens is None:
        num_tokens = min(DRAFT_MODEL_TOKENS, config.speculative_tokens_max) if has_draft_model else 0
    return SpeculationOffer(
        num_tokens,
        config.speculative_tokens_max,
        METHODS[config.speculative_method],
        config.speculative_schedule,
        VERIFICATIONS[config.speculative_verification],
        has_draft_model,
        has_history,
        config.speculative_history,
    )


def _one_of(values: Iterable[str]) -> tuple[OneOf, Rule]:
    return OneOf(tuple(values)), Rule(f"must be one of {', '.join(values)}. Given: {{given}}")


_Method = Annotated[str, *_one_of(METHODS)]
_Schedule = Annotated[str, *_one_of(SCHEDULES)]
_Verification = Annotated[
    str,
    *_one_of(VERIFICATIONS),
    BeforeValidator(lambda value: DEPRECATED_VALUES.get(value, value) if isinstance(value, str) else value),
]


def _check_twice(verification: str, info: ValidationInfo) -> str:
    if info.data.get("speculative_verification") is not None:
        raise WrongJsonType("duplicate field `speculative_verification`", "speculative_verification")
    return verification


class SpeculationGroup(Body):
    """Fields of speculative decoding, on every generation route."""

    speculative_tokens: U32 | None = Field(None, description="Maximum draft tokens per step; 0 for none")
    speculative_method: _Method | None = Field(
        None, description="What proposes draft tokens; the text does not depend on it"
    )
    speculative_schedule: _Schedule | None = Field(
        None, description="Draft length: always the maximum, by the last step's acceptance, or the fastest"
    )
    speculative_verification: _Verification | None = Field(
        None,
        description="Verification of a draft model's tokens: shared-noise keeps the text, rejection its distribution; "
        "requests with a `seed` always use shared-noise",
    )
    speculative_verify: Annotated[_Verification, AfterValidator(_check_twice)] | None = Field(
        None, json_schema_extra={"deprecated": True}, description="Use `speculative_verification`"
    )
    speculative_history: bool | None = Field(
        None, description="Whether outputs of earlier requests of the same tenant and adapter are proposed as drafts"
    )
    speculation = Rejected("is not supported by this server: use `speculative_tokens`")

    def speculation_fields(self, heads_id: str | None, prediction: str | None = None) -> SpeculationFields:
        """What the group asks for."""
        return SpeculationFields(
            self.speculative_tokens,
            self.speculative_method,
            self.speculative_schedule,
            self.speculative_verification or self.speculative_verify,
            names_heads=heads_id not in (None, "", *BASE_NAMES),
            prediction=prediction,
            history=self.speculative_history,
        )


class PredictionPart(Body):
    """A part of a predicted output."""

    type: Annotated[Any, published_as(Literal["text"])] = None
    text: Annotated[Any, published_as(str)] = None


class Prediction(Body):
    """OpenAI's: a text that the output may repeat."""

    type: Annotated[Any, published_as(Literal["content"])] = None
    content: Annotated[list[PredictionPart], fail_fast] | Annotated[Any, published_as(str)] = Field(
        None, union_mode="left_to_right"
    )

    def read_text(self) -> str:
        """The whole text. Raises ValidationError."""
        if self.type != "content":
            raise ValidationError("`prediction.type` must be content", "prediction")
        parts = self.content if isinstance(self.content, list) else [PredictionPart(type="text", text=self.content)]
        texts = [part.text for part in parts if isinstance(part, PredictionPart) and part.type == "text"]
        if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
            raise ValidationError("`prediction.content` must be a text or a list of text parts", "prediction")
        return "".join(texts)


def excludes_heads(method: object, num_tokens: object) -> bool:
    """Whether a request with these fields never uses Medusa heads."""
    return num_tokens == 0 or (method in METHODS and METHODS[str(method)] not in ("auto", "medusa"))


def fill_defaults(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`fields` of a body with the defaults of those that are absent or null.

    `heads_id` is no default of a request whose method or draft length excludes heads.
    """
    names = {DEPRECATED_FIELDS.get(name, name) for name, value in fields.items() if value is not None}
    if excludes_heads(fields.get("speculative_method"), fields.get("speculative_tokens")):
        names.add("heads_id")
    missing = {name: value for name, value in defaults.items() if DEPRECATED_FIELDS.get(name, name) not in names}
    return {**fields, **missing}


def resolve_speculation(fields: SpeculationFields, offer: SpeculationOffer, *, is_seeded: bool) -> Speculation:
    """The request's settings with the server's defaults. Raises ValidationError.

    `is_seeded` is whether the client gave a seed, which promises a reproducible text. The rejection rule preserves the
    distribution only, so such a request is verified with shared noise.
    """
    if fields.num_tokens is not None and fields.num_tokens > offer.max_tokens:
        rule = f"must be <= {offer.max_tokens}. Given: {fields.num_tokens}"
        raise ValidationError(f"`speculative_tokens` {rule}", "speculative_tokens")
    method = METHODS[fields.method] if fields.method else offer.method
    if fields.prediction is not None and fields.method and method not in ("auto", "lookup"):
        raise ValidationError(
            f"`prediction` needs `speculative_method` lookup or auto: {fields.method} would ignore it", "prediction"
        )
    if fields.names_heads and excludes_heads(fields.method, fields.num_tokens):
        raise ValidationError("`heads_id` needs `speculative_method` medusa or auto and draft tokens", "heads_id")
    wants_drafts = fields.num_tokens or fields.names_heads or fields.prediction or fields.history
    if method == "off" and not fields.method and wants_drafts:
        method = "auto"  # the server's default holds for requests without these fields
    verification = VERIFICATIONS[fields.verification] if fields.verification else offer.verification
    if not offer.has_draft_model and fields.method == "draft":
        raise UnsupportedField("speculative_method", "draft requires --draft-model-id")
    if not offer.has_draft_model and fields.verification and verification == "rejection":
        raise UnsupportedField("speculative_verification", f"{fields.verification} requires --draft-model-id")
    _check_history(fields, offer, method)
    if method == "off" or fields.num_tokens == 0:
        return NO_SPECULATION
    uses_draft_model = offer.has_draft_model and method in ("auto", "draft")
    is_rejection = verification == "rejection" and uses_draft_model and not is_seeded
    num_heads = ALL_HEADS if fields.num_tokens is None else fields.num_tokens
    return Speculation(
        Method(method),
        _num_tokens(fields, offer) if method != "medusa" else 0,
        num_heads if method in ("auto", "medusa") else 0,
        Schedule(fields.schedule or offer.schedule),
        Verification.REJECTION if is_rejection else Verification.SHARED_NOISE,
    )


def takes_history(fields: SpeculationFields, offer: SpeculationOffer, speculation: Speculation) -> bool:
    """Whether the outputs of earlier requests are proposed to a request."""
    history = offer.history if fields.history is None else fields.history
    return history and speculation.method in (Method.AUTO, Method.LOOKUP)


def _check_history(fields: SpeculationFields, offer: SpeculationOffer, method: str) -> None:
    """Raises ValidationError where `speculative_history` asks for what is not done."""
    if not fields.history:
        return
    if not offer.has_history:
        raise UnsupportedField("speculative_history", "needs a shard with --history-memory and a C compiler")
    if method not in ("auto", "lookup") or fields.num_tokens == 0:
        raise ValidationError(
            "`speculative_history` needs `speculative_method` lookup or auto, and draft tokens", "speculative_history"
        )


def _num_tokens(fields: SpeculationFields, offer: SpeculationOffer) -> int:
    """Draft tokens per step at most, of lookup and of the draft model."""
    if fields.num_tokens is not None:
        return fields.num_tokens
    default = PREDICTED_TOKENS if fields.prediction else DEFAULT_TOKENS if fields.method or fields.history else 0
    return offer.num_tokens or min(default, offer.max_tokens)


MAX_BIASES = 1024
_RANGES = ranges(SamplingParams)
_PENALTY_RULE = Rule(f"must be {_RANGES['repetition_penalty']}", not_positive="must be strictly positive")
_BEAMS = "is of beam search, which this server does not support"


def _check_num_biases(value: Any) -> Any:
    """Before the values, whatever they are."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValidationError(f"`logit_bias` supports up to {MAX_BIASES} tokens. Given: {len(value)}", "logit_bias")
    return value


def _check_biases(biases: dict[str, float]) -> dict[str, float]:
    for name, bias in biases.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 9):
            raise ValidationError("`logit_bias` must map token ids to numbers", "logit_bias")
        if bias not in LOGIT_BIAS_RANGE:
            raise ValidationError("`logit_bias` values must be >= -100 and <= 100", "logit_bias")
    return biases


def _within(name: str, default: float) -> Any:
    """A field with the range of the parameter of that name."""
    bounds: dict[str, Any] = {**_RANGES[name].bounds}
    return Field(default, **bounds)


class SamplingGroup(Body):
    """LoRAX checks them in this order. Ranges of its own routes and of OpenAI's differ: their bodies narrow these."""

    temperature: F32 = 1.0
    repetition_penalty: Annotated[F32, _PENALTY_RULE] = _within("repetition_penalty", 1.0)
    frequency_penalty: F32 = _within("frequency_penalty", 0.0)
    presence_penalty: F32 = _within("presence_penalty", 0.0)
    top_p: F32 = 1.0
    min_p: F32 = _within("min_p", 0.0)
    typical_p: F32 = 1.0
    top_k: I32 = 0
    do_sample: bool = False
    logit_bias: Annotated[dict[str, F32], BeforeValidator(_check_num_biases), AfterValidator(_check_biases)] = Field(
        default_factory=dict, description=f"By token id, -100 to 100; at most {MAX_BIASES}"
    )
    use_beam_search = Rejected(neutral=(False,))
    length_penalty = Rejected(_BEAMS, (1.0,))
    custom_logit_processor = Rejected(neutral=("",))

    def sampled(self, *, do_sample: bool, watermark: bool = False) -> SamplingParams:
        """A temperature of 0 is greedy."""
        return SamplingParams(
            do_sample=do_sample and self.temperature > 0.0,
            temperature=self.temperature or 1.0,
            # The empty nucleus keeps the likeliest token.
            top_k=1 if self.top_p == 0.0 else max(self.top_k, 0),
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            watermark=watermark,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items()),
        )


MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 16384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 256


@dataclass(frozen=True)
class Constraints:
    """Typed and checked, but for the vocabulary."""

    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool | None = None
    """Whether the text includes what ended it; None for the route's default."""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True

    @property
    def masks(self) -> str | None:
        """The first field that excludes tokens; None where no token is excluded."""
        names = ("allowed_token_ids", "bad_words", "min_tokens")
        return next((name for name in names if getattr(self, name)), None)


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises ValidationError where the output would have to be longer than it may be."""
    if min_tokens > max_tokens:
        rule = f"must be <= the maximum number of generated tokens, {max_tokens}"
        raise ValidationError(f"`min_tokens` {rule}. Given: {min_tokens}", "min_tokens")


def token_ids(most: int) -> PlainValidator:
    """Type of at most `most` token ids, which are read in ascending order, each once."""

    def read(value: Any, info: ValidationInfo) -> tuple[int, ...]:
        name = info.field_name
        if value == []:
            return ()
        if isinstance(value, list) and len(value) > most:
            raise ValidationError(f"`{name}` supports up to {most} token ids. Given: {len(value)}", name)
        if not isinstance(value, list) or not are_token_ids(value):
            raise ValidationError(f"`{name}` must be a list of token ids", name)
        return tuple(sorted(set(value)))

    return PlainValidator(read, json_schema_input_type=Annotated[list[int], Field(max_length=most)])


def _check_min_new_tokens(count: int, info: ValidationInfo) -> int:
    if info.data.get("min_tokens") not in (None, count):
        raise ValidationError("`min_tokens` and `min_new_tokens` cannot both be set", "min_new_tokens")
    return count


def _check_no_stop_trim(is_whole: bool, info: ValidationInfo) -> bool:
    if is_whole and info.data.get("include_stop_str_in_output") is False:
        raise ValidationError("`no_stop_trim` contradicts `include_stop_str_in_output`", "no_stop_trim")
    return is_whole


def _check_bad_words(words: list[str]) -> list[str]:
    if len(words) > MAX_BAD_WORDS:
        raise ValidationError(f"`bad_words` supports up to {MAX_BAD_WORDS} words. Given: {len(words)}", "bad_words")
    for word in words:
        if not word.strip():
            raise ValidationError("`bad_words` must not contain an empty word", "bad_words")
        if len(word.encode(errors="replace")) > MAX_BAD_WORD_BYTES:
            raise ValidationError(f"a word of `bad_words` may have up to {MAX_BAD_WORD_BYTES} bytes", "bad_words")
    return words


class ConstraintGroup(Body):
    """Fields of every generation route: which tokens the output may have, and what ends it."""

    ignore_eos: bool = Field(False, description="End-of-text tokens do not end the output")
    ignore_eos_token: bool = Field(False, description="The same as `ignore_eos`")
    min_tokens: U32 | None = Field(
        None, description="Until the output has so many tokens, end-of-text and stop tokens cannot be sampled and "
        "stop strings do not count; default 0"
    )  # fmt: skip
    min_new_tokens: Annotated[U32, AfterValidator(_check_min_new_tokens)] | None = Field(
        None, description="The same as `min_tokens`"
    )
    stop_token_ids: Annotated[tuple[int, ...], token_ids(MAX_STOP_TOKENS)] = Field(
        (), description=f"Tokens that end the output, at most {MAX_STOP_TOKENS}"
    )
    stop_regex = Rejected(neutral=([], ""))
    include_stop_str_in_output: bool | None = Field(
        None, description="Whether the text includes what ended it, stop tokens too; default: stop strings on LoRAX's "
        "routes"
    )  # fmt: skip
    no_stop_trim: Annotated[bool, AfterValidator(_check_no_stop_trim)] = Field(
        False, description="True: the same as `include_stop_str_in_output`"
    )
    repetition_detection = thinking_token_budget = Rejected()
    allowed_token_ids: Annotated[tuple[int, ...], token_ids(MAX_ALLOWED_TOKENS)] = Field(
        (), description=f"The only tokens of the output, at most {MAX_ALLOWED_TOKENS}"
    )
    bad_words: Annotated[Texts, AfterValidator(_check_bad_words)] = Field(
        default_factory=list,
        description="Texts that the output does not have at its start or after a space, at most "
        f"{MAX_BAD_WORDS} of {MAX_BAD_WORD_BYTES} bytes",
    )
    skip_special_tokens: bool = Field(True, description="False shows special tokens in the text")
    spaces_between_special_tokens: bool = Field(
        True, description="Special tokens are never separated by spaces, whatever the value"
    )

    def constraints(self) -> Constraints:
        """What the group asks for."""
        return Constraints(
            ignore_eos=self.ignore_eos or self.ignore_eos_token,
            min_tokens=(self.min_new_tokens if self.min_tokens is None else self.min_tokens) or 0,
            stop_token_ids=self.stop_token_ids,
            include_stop=True if self.no_stop_trim else self.include_stop_str_in_output,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=tuple(self.bad_words),
            skip_special_tokens=self.skip_special_tokens,
        )


MAX_SALT = 256
"""Characters of `cache_salt`."""
_OLDER = "is OpenAI's older form, which this server does not support: use `tools` and `tool_choice`"
_TEMPLATE = "is applied by /v1/chat/completions, which has a chat template"
_CHAT_ONLY = "is applied by /v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class RequestFields:
    """What a body asks of the model: typed and checked, neither tokenized nor resolved."""

    adapter: AdapterFields
    heads: AdapterFields | None = None
    """Adapter fields of `heads_id`; None on routes without it."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams = field(default_factory=LogprobParams)
    num_sequences: int = 1
    """Sequences of each prompt."""
    seed: int | None = None
    """None for random ones. Further sequences of a prompt have the numbers after it."""
    stop: tuple[str, ...] = ()
    include_stop: bool = True
    """Whether the stop string stays in the text, unless the constraints say otherwise."""
    constraints: Constraints = field(default_factory=Constraints)
    speculation: SpeculationFields = field(default_factory=SpeculationFields)
    grammar: GrammarFields | None = None
    """A conversation with tools has a grammar of its own."""
    pooling: Pooling | None = None
    cache_salt: str | None = None
    """Requests share cached prefixes only under equal ones."""
    priority: int = 0
    receipt: bool = False
    is_probe: bool = False
    """Whether the output is discarded, because only the prompt is scored."""


class GenerationGroup(StructuredGroup, SpeculationGroup, ConstraintGroup, SamplingGroup, GeneratingAdapterGroup):
    """Fields of every generation route."""

    cache_salt: Annotated[str, Rule(f"must have 1 to {MAX_SALT} characters")] | None = Field(
        None, min_length=1, max_length=MAX_SALT, description="Requests share cached prefixes only under equal salts"
    )
    priority: I32 = Field(0, description="Of a caller's waiting requests for an adapter, lower ones are served first")
    prompt_embeds = audio = guideline = Rejected()
    modalities = Rejected(neutral=(["text"],))
    watermarking = Rejected(neutral=(False,))
    functions = Rejected(_OLDER, ([],))
    function_call = Rejected(_OLDER, ("none",))
    return_prompt_text = return_token_offsets = apply_chat_template = custom_params = Ignored()
    guided_decoding_backend = include_reasoning = kv_transfer_params = media_io_kwargs = Ignored()
    mm_processor_kwargs = moderation = prompt_cache_key = prompt_cache_options = Ignored()
    prompt_cache_retention = rid = safety_identifier = separate_reasoning = session_id = store = Ignored()
    stream_interval = stream_reasoning = use_cache = vllm_xargs = web_search_options = Ignored()


class ReportGroup(Body):
    """Fields that ask for more than a text."""

    details: bool = Field(False, description="Adds the tokens, with source and log probability")
    receipt: bool = Field(False, description="Adds what is needed to reproduce the text, for `lorikeet-replay`")


class PromptOnlyGroup(Body):
    """Fields of conversations, on routes that take a prompt."""

    add_generation_prompt = Rejected(_TEMPLATE, (True,))
    continue_final_message = Rejected(_TEMPLATE, (False,))
    chat_template = Rejected(_TEMPLATE, ("",))
    chat_template_kwargs = Rejected(_TEMPLATE, ({},))
    documents = Rejected(_TEMPLATE, ([],))
    tools = Rejected(_CHAT_ONLY, ([],))
    tool_choice = Rejected(_CHAT_ONLY, ("none",))
    tool_prompt = Rejected(_CHAT_ONLY, ("",))
    reasoning_effort = verbosity = parallel_tool_calls = Ignored()


def without(values: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    """A body without the field at `path`."""
    name, *rest = path
    if rest and isinstance(values.get(str(name)), dict):
        return {**values, str(name): without(values[str(name)], tuple(rest))}
    return {other: value for other, value in values.items() if other != name}
