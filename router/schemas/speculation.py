"""What a request says about guessing ahead: `speculative_tokens` and `speculative_method`, on every generation route.

Knows the words and their bounds. What is guessed never changes a text, so nothing here is about sampling.
"""

from dataclasses import dataclass

from router.config import RouterConfig
from router.errors import UnsupportedField, ValidationError
from router.generation import NO_SPECULATION, Speculation
from router.schemas.fields import Fields

METHODS = {"auto": "auto", "lookup": "lookup", "ngram": "lookup", "off": "off"}
LATER_METHODS = ("medusa", "draft")
DEFAULT_TOKENS = 3
"""Where a method is named, but neither request nor server say how many."""
PREDICTED_TOKENS = 8
"""The same where the request brings a text that its output may repeat."""


@dataclass(frozen=True)
class SpeculationFields:
    """Typed, not yet checked."""

    num_tokens: int | None = None
    method: str | None = None
    prediction: str | None = None
    """OpenAI's: a text that the output may repeat."""


def read_speculation(fields: Fields) -> SpeculationFields:
    """Raises WrongJsonType."""
    return SpeculationFields(fields.integer("speculative_tokens", "u32"), fields.text("speculative_method"))


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


def settle_speculation(wanted: SpeculationFields, config: RouterConfig) -> Speculation:
    """With the server's defaults. Raises ValidationError."""
    method = METHODS.get(wanted.method or "auto")
    if method is None:
        if wanted.method in LATER_METHODS:
            raise UnsupportedField("speculative_method", wanted.method)
        names = ", ".join(METHODS)
        raise ValidationError(
            f"`speculative_method` must be one of {names}. Given: {wanted.method}", "speculative_method"
        )
    num_tokens = wanted.num_tokens
    if num_tokens is None:
        unasked = PREDICTED_TOKENS if wanted.prediction else DEFAULT_TOKENS if wanted.method else 0
        num_tokens = config.speculative_tokens or min(unasked, config.speculative_tokens_max)
    if num_tokens > config.speculative_tokens_max:
        raise ValidationError(
            f"`speculative_tokens` must be <= {config.speculative_tokens_max}. Given: {num_tokens}",
            "speculative_tokens",
        )
    return Speculation(method, num_tokens) if num_tokens and method != "off" else NO_SPECULATION
