"""What the bodies of all generation routes have in common, and what the bodies of all routes to the model become."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo

from lorikeet.proto.params import LOGIT_BIAS_RANGE, LogprobParams, Pooling, SamplingParams, ranges
from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.adapters import AdapterFields, GeneratingAdapterGroup
from lorikeet.router.schemas.grammar import GrammarFields, StructuredGroup
from lorikeet.router.schemas.model import F32, I32, U32, Body, Ignored, Rejected, Rule, Texts, are_token_ids
from lorikeet.router.schemas.speculation import SpeculationFields, SpeculationGroup

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
