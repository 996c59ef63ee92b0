"""Fields of speculative decoding, on every generation route: reading, rules, and the server's defaults.

Speculation never changes the distribution of a text, so nothing here is about sampling.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from lorikeet.proto.draft_sources import methods
from lorikeet.proto.params import ALL_HEADS, NO_SPECULATION, Method, Schedule, Speculation, Verification
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import UnsupportedField, ValidationError, WrongJsonType
from lorikeet.router.schemas.adapters import BASE_NAMES
from lorikeet.router.schemas.model import U32, Body, OneOf, Rejected, Rule, fail_fast, published_as

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
