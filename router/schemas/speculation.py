"""What a request says about guessing ahead, on every generation route, and what comes of it on this server.

Knows the words and their bounds. What is guessed never changes the law of a text, so nothing here is about sampling.
"""

from dataclasses import dataclass

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.requests.types import ALL_HEADS, NO_SPECULATION, Speculation
from lorikeet.router.schemas.adapters import BASE_NAMES
from lorikeet.router.schemas.fields import Fields

METHODS = {"auto": "auto", "lookup": "lookup", "ngram": "lookup", "medusa": "medusa", "draft": "draft", "off": "off"}
SCHEDULES = ("constant", "heuristic", "auto")
RULES = {"coupled": "coupled", "rejection": "rejection", "google": "rejection", "deepmind": "rejection"}
"""Google's and DeepMind's papers have the same rule (Leviathan et al. 2023; Chen et al. 2023)."""
DEFAULT_TOKENS = 3
"""Where a method is named, but neither request nor server say how many."""
PREDICTED_TOKENS = 8
"""The same where the request brings a text that its output may repeat."""
DRAFT_MODEL_TOKENS = 4
"""The server's own word where it has a draft model and was not told."""


@dataclass(frozen=True)
class SpeculationFields:
    """Typed, not yet checked."""

    num_tokens: int | None = None
    method: str | None = None
    schedule: str | None = None
    verify: str | None = None
    names_heads: bool = False
    """Whether there is a `heads_id`."""
    prediction: str | None = None
    """OpenAI's: a text that the output may repeat."""


@dataclass(frozen=True)
class Offer:
    """What the server can do, and what it does for requests that don't say."""

    num_tokens: int
    """0 where nobody said."""
    most: int
    method: str
    schedule: str
    verify: str
    has_draft_model: bool


def make_offer(config: RouterConfig, shards_draft_model: str) -> Offer:
    """`shards_draft_model` is what a shard says of its own, "" for none."""
    has_draft_model = bool(config.draft_model_id or shards_draft_model)
    num_tokens = config.speculative_tokens
    if num_tokens is None:
        num_tokens = min(DRAFT_MODEL_TOKENS, config.speculative_tokens_max) if has_draft_model else 0
    return Offer(
        num_tokens,
        config.speculative_tokens_max,
        METHODS[config.speculative_method],
        config.speculative_schedule,
        {"shared-noise": "coupled"}.get(config.speculative_verification, config.speculative_verification),
        has_draft_model,
    )


def read_speculation(fields: Fields) -> SpeculationFields:
    """Raises WrongJsonType."""
    return SpeculationFields(
        fields.integer("speculative_tokens", "u32"),
        fields.text("speculative_method"),
        fields.text("speculative_schedule"),
        fields.text("speculative_verify"),
        fields.take("heads_id") not in (None, "", *BASE_NAMES),
    )


def read_prediction(fields: Fields) -> str | None:
    """OpenAI's `prediction`: a text, or parts of one. Raises WrongJsonType or ValidationError."""
    if not fields.has("prediction"):
        fields.take("prediction")  # null, which asks for nothing
        return None
    given = fields.child("prediction")
    if given.text("type") != "content":
        raise ValidationError("`prediction.type` must be content", "prediction")
    content = given.take("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ValidationError("`prediction.content` must be a text or a list of text parts", "prediction")
        texts.append(text)
    return "".join(texts)


def rules_heads_out(method: object, num_tokens: object) -> bool:
    """Whether a request that says this has no guesses of heads, whatever heads there are."""
    return num_tokens == 0 or (method in METHODS and METHODS[str(method)] not in ("auto", "medusa"))


def check_speculation(wanted: SpeculationFields, most: int) -> None:
    """Whether the words are known and the number is in bounds. Raises ValidationError."""
    known: dict[str, tuple[str | None, tuple[str, ...]]] = {
        "speculative_method": (wanted.method, tuple(METHODS)),
        "speculative_schedule": (wanted.schedule, SCHEDULES),
        "speculative_verify": (wanted.verify, tuple(RULES)),
    }
    for name, (word, words) in known.items():
        if word is not None and word not in words:
            raise ValidationError(f"`{name}` must be one of {', '.join(words)}. Given: {word[:80]}", name)
    if wanted.num_tokens is not None and wanted.num_tokens > most:
        raise ValidationError(
            f"`speculative_tokens` must be <= {most}. Given: {wanted.num_tokens}", "speculative_tokens"
        )


def resolve_speculation(wanted: SpeculationFields, offer: Offer, *, is_seeded: bool) -> Speculation:
    """With the server's defaults, for a request whose user gave a seed or did not. Raises ValidationError.

    A user's seed promises a text; the rejection rule keeps a law only, so such a request is verified by coupling.
    """
    check_speculation(wanted, offer.most)
    method = METHODS[wanted.method] if wanted.method else offer.method
    if wanted.prediction is not None and wanted.method and method not in ("auto", "lookup"):
        raise ValidationError(
            f"a `prediction` is looked up in: `speculative_method` {wanted.method} would ignore it", "prediction"
        )
    if wanted.names_heads and rules_heads_out(wanted.method, wanted.num_tokens):
        raise ValidationError(
            "`heads_id` names heads, and the method or number of guesses leaves none to them", "heads_id"
        )
    if method == "off" and not wanted.method and (wanted.num_tokens or wanted.names_heads or wanted.prediction):
        method = "auto"  # the operator's word is for those who ask for nothing
    if not offer.has_draft_model and wanted.method == "draft":
        raise UnsupportedField("speculative_method", "draft needs a draft model, and this server has none")
    if not offer.has_draft_model and RULES.get(wanted.verify or "") == "rejection":
        raise UnsupportedField("speculative_verify", f"{wanted.verify} needs a draft model, and this server has none")
    if method == "off" or wanted.num_tokens == 0:
        return NO_SPECULATION
    verify = RULES[wanted.verify] if wanted.verify else offer.verify
    is_rejection = verify == "rejection" and offer.has_draft_model and method in ("auto", "draft") and not is_seeded
    num_heads = ALL_HEADS if wanted.num_tokens is None else wanted.num_tokens
    return Speculation(
        method,
        _num_tokens(wanted, offer) if method != "medusa" else 0,
        num_heads if method in ("auto", "medusa") else 0,
        wanted.schedule or offer.schedule,
        "rejection" if is_rejection else "coupled",
        needs_heads=wanted.method == "medusa",
    )


def _num_tokens(wanted: SpeculationFields, offer: Offer) -> int:
    """What bounds lookup and draft model in a step."""
    if wanted.num_tokens is not None:
        return wanted.num_tokens
    unasked = PREDICTED_TOKENS if wanted.prediction else DEFAULT_TOKENS if wanted.method else 0
    return offer.num_tokens or min(unasked, offer.most)
