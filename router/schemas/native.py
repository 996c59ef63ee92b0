"""The bodies of LoRAX's generation routes, with LoRAX's rules in its order and words.

Rules on lengths need the tokenized prompt: they are in `check_lengths`.
"""

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from lorikeet.proto.params import FILTERS, MAX_ALTERNATIVES, LogprobParams, SamplingParams
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.adapters import OTHER_SERVERS, other_servers_fields
from lorikeet.router.schemas.generation import GenerationGroup, PromptOnlyGroup, ReportGroup, RequestFields, without
from lorikeet.router.schemas.model import (
    F32,
    I32,
    U32,
    U64,
    Body,
    BrokenRule,
    Ignored,
    Rejected,
    Rule,
    Texts,
    are_token_ids,
    is_same,
)
from lorikeet.router.text.stop import check_stops
from lorikeet.router.text.tokenizer import TokenLength

_NOTHING: tuple[Any, ...] = ("", [], {}, False)
_FIELDS_OF_SAMPLING = frozenset(("temperature", *FILTERS))
_OPENAI_ONLY = "is applied by /v1/completions and /v1/chat/completions"
_MORE_THAN_TEXT = ("details", "decoder_input_details", "receipt", "stream")
_TEXT_ONLY = "is not supported by this route, whose answer is only a text"


def _use(instead: str) -> str:
    return f"is not supported by this route: use {instead}"


class ParameterGroup(PromptOnlyGroup, GenerationGroup):
    """Fields of LoRAX's `parameters` and of the body of `/predict`."""

    best_of: U64 | None = Field(None, description="Number of texts, of which the likeliest is returned; needs sampling")
    temperature: F32 = Field(1.0, ge=0.0, description="0 is greedy; 0 or 1 alone do not sample")
    top_p: Annotated[F32, Rule("must be > 0.0 and < 1.0")] = Field(1.0, gt=0.0, le=1.0)
    typical_p: F32 = Field(1.0, gt=0.0, lt=1.0)
    top_k: I32 = Field(0, gt=0)
    do_sample: bool = False
    return_k_alternatives: (
        Annotated[I32, Rule(f"must be <= {MAX_ALTERNATIVES}", not_positive="must be strictly positive")] | None
    ) = Field(None, gt=0, le=MAX_ALTERNATIVES, description="Likeliest tokens returned with each token")
    top_n_tokens: Annotated[U32, Rule(f"must be <= {MAX_ALTERNATIVES}")] | None = Field(
        None, le=MAX_ALTERNATIVES, description="Likeliest tokens returned in `top_tokens`, as in TGI"
    )
    max_new_tokens: U32 | None = Field(
        None, gt=0, description="Default: what the prompt leaves of max_total_tokens, or of 4096 where that is not set"
    )
    stop: Texts = Field(default_factory=list, description="Ends the text, which includes it")
    stop_sequences: Texts = Field(default_factory=list, description="More of `stop`")
    seed: U64 | None = Field(None, description="The same seed gives the same text, alone or in any batch")
    truncate: U64 | None = Field(None, description="Keeps only this number of tokens, from the end of the prompt")
    add_special_tokens: bool = Field(True, description="Whether the tokenizer's special tokens are added")
    return_full_text: bool = Field(False, description="Prepends the prompt to the text")
    watermark: bool = False

    truncate_prompt_tokens = Rejected(_use("`truncate`"))
    truncation_side = Rejected(neutral=("left",))
    echo = Rejected(_use("`return_full_text`"), (False,))
    suffix = Rejected("is applied by /v1/completions", ("",))
    max_tokens = max_completion_tokens = Rejected(_use("`max_new_tokens`"))
    n = Rejected(_use("`best_of`, or /v1/completions"), (1,))
    prediction = Rejected(_OPENAI_ONLY)
    prompt_logprobs = Rejected(_use("`decoder_input_details`"))
    logprob_token_ids = Rejected(_OPENAI_ONLY, ([],))
    return_token_ids = Rejected(_use("`details`"), (False,))
    logprobs = top_logprobs = Ignored("`details` and `return_k_alternatives` have them")
    metadata = service_tier = return_tokens_as_token_ids = user = request_id = Ignored()

    @property
    def wants_sampling(self) -> bool:
        """Whether any sampling field is set, whatever its value, as `best_of` requires."""
        return self.do_sample or not _FIELDS_OF_SAMPLING.isdisjoint(self.model_fields_set)

    def sampling(self) -> SamplingParams:
        """A temperature of 1 alone does not sample, and one of 0 never does."""
        warps = self.temperature != 1.0 or any(getattr(self, name) != value for name, value in FILTERS.items())
        return self.sampled(do_sample=self.do_sample or warps, watermark=self.watermark)


class GenerateParameters(ReportGroup, ParameterGroup):
    """LoRAX's `parameters`."""

    decoder_input_details: bool = Field(False, description="Log probabilities of the prompt; not when streaming")


_NO_PARAMETERS = GenerateParameters.read({})


def _text_or_ids(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and are_token_ids(value)):
        return value
    raise PydanticCustomError("text_or_ids", "Input should be a valid string, or a list of token ids")


LoraxBody = TypeVar("LoraxBody", bound="GenerateRequest")


class GenerateRequest(Body):
    """The body of `/generate` and `/generate_stream`."""

    inputs: Annotated[
        str | list[int],
        PlainValidator(_text_or_ids, json_schema_input_type=Annotated[str, Field(min_length=1)] | list[int]),
    ] = Field(description="A text or token ids")
    parameters: GenerateParameters = Field(default_factory=lambda: _NO_PARAMETERS)
    broken: ClassVar[tuple[str, str | None] | None] = None
    """Message and field of a value outside of its range, which is reported among LoRAX's other rules."""

    @classmethod
    def read(cls: type[LoraxBody], values: Any, context: Any = None) -> LoraxBody:
        """Leaves values outside of their range to `check`."""
        try:
            return super().read(values, context)
        except BrokenRule as error:
            broken, path = (error.message, error.param), error.path
        request = cls.read(without(values, path), context)
        vars(request)["broken"] = broken  # not the error, whose traceback holds the body
        return request

    @property
    def text(self) -> str:
        """The prompt, empty where it was given as token ids."""
        return self.inputs if isinstance(self.inputs, str) else ""

    @property
    def input_ids(self) -> list[int] | None:
        """The prompt's token ids, where they were given."""
        return self.inputs if isinstance(self.inputs, list) else None

    def to_request(self, config: RouterConfig, *, streaming: bool) -> RequestFields:
        """What the body asks of the model. Values of unknown fields are dropped.

        Raises ValidationError for the first rule of LoRAX that is broken.
        """
        parameters = self.parameters
        if streaming:
            if parameters.best_of not in (None, 1):
                raise ValidationError("`best_of` != 1 is not supported when streaming tokens", "best_of")
            if parameters.decoder_input_details:
                raise ValidationError(
                    "`decoder_input_details` == true is not supported when streaming tokens", "decoder_input_details"
                )
        adapter = parameters.adapter()
        self._check_best_of(config)
        if self.broken is not None:
            raise ValidationError(*self.broken)
        self._check_counts(config)
        grammar = parameters.grammar_fields()
        if config.unknown_fields != "ignore":
            parameters.check_supported()
            for name in self._misplaced():
                raise UnsupportedField(name, "belongs in `parameters`")
        self.forget()
        return RequestFields(
            adapter=adapter,
            heads=parameters.heads(),
            sampling=parameters.sampling(),
            logprobs=LogprobParams(
                wanted=True,
                alternatives=max(parameters.return_k_alternatives or 0, parameters.top_n_tokens or 0),
                prefill=parameters.decoder_input_details,
            ),
            num_sequences=max(parameters.best_of or 1, 1),
            seed=parameters.seed,
            stop=(*parameters.stop, *parameters.stop_sequences),
            constraints=parameters.constraints(),
            speculation=parameters.speculation_fields(parameters.heads_id),
            grammar=grammar,
            cache_salt=parameters.cache_salt,
            priority=parameters.priority,
            receipt=parameters.receipt,
        )

    def _misplaced(self) -> list[str]:
        """Fields next to `parameters` that ask for something and belong in it."""
        extra = self.__pydantic_extra__ or {}
        rejected = {**GenerateParameters.rejected, **dict.fromkeys(other_servers_fields(extra), OTHER_SERVERS)}
        return [
            name
            for name, value in extra.items()
            if (
                (name in GenerateParameters.applied and value is not None)
                or (name in rejected and rejected[name].asks(value))
            )
            and not any(is_same(value, nothing) for nothing in _NOTHING)
        ]

    def _check_best_of(self, config: RouterConfig) -> None:
        best_of = self.parameters.best_of
        if best_of is None or best_of == 1:
            return
        if best_of > 1 and not self.parameters.wants_sampling:
            raise ValidationError("you must use sampling when `best_of` is > 1", "best_of")
        if best_of > 1 and self.parameters.seed is not None:
            raise ValidationError("`seed` must not be set when `best_of` > 1", "seed")
        if config.max_best_of == 1:
            raise ValidationError("`best_of` != 1 is not allowed for this endpoint", "best_of")
        if best_of < 1 or best_of > config.max_best_of:
            raise ValidationError(f"`best_of` must be > 0 and <= {config.max_best_of}. Given: {best_of}", "best_of")

    def _check_counts(self, config: RouterConfig) -> None:
        parameters = self.parameters
        check_stops([*parameters.stop, *parameters.stop_sequences], config.max_stop_sequences)
        if self.inputs == "":
            raise ValidationError("`inputs` cannot be empty", "inputs")
        if parameters.return_full_text and self.input_ids is not None:
            raise ValidationError("`return_full_text` needs `inputs` as a text", "return_full_text")
        truncate = parameters.truncate
        if truncate is not None and not 0 < truncate <= config.max_input_length:
            raise ValidationError(
                f"`truncate` must be strictly positive and less than {config.max_input_length}. Given: {truncate}",
                "truncate",
            )


class CompatGenerateRequest(GenerateRequest):
    """The body of `/`, and of `/invocations` as LoRAX has it."""

    stream: bool = False


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


class PredictRequest(ParameterGroup):
    """The body of `/predict`. By default 40 tokens, `top_k` 10, `top_p` 0.9, four draft tokens per step, and the prompt
    before the text.
    """

    prompt: Annotated[str, Rule("cannot be empty")] = Field(min_length=1)
    details = decoder_input_details = receipt = stream = Rejected(_TEXT_ONLY, (False,))

    def parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        """`parameters` of the body of `/generate` that this one stands for. Raises UnsupportedField."""
        for name, row in self.unsupported():
            if name in _MORE_THAN_TEXT:
                raise UnsupportedField(name, row.reason)
        return {name: value for name, value in body.items() if name not in ("prompt", *_MORE_THAN_TEXT)}
