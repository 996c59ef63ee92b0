"""Fields of OpenAI's routes, vLLM's among them, about what an answer contains."""

from dataclasses import dataclass

from lorikeet.proto.params import MAX_ALTERNATIVES
from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.constraints import token_ids
from lorikeet.router.schemas.fields import Fields

MAX_PROMPT_LOGPROBS = 20
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_TIERS = ("auto", "default", "flex", "scale", "priority")


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


def read_report_fields(fields: Fields, *, stream: bool) -> ReportFields:
    """Raises WrongJsonType or ValidationError."""
    count = fields.integer("prompt_logprobs", "i32")
    if count is not None and not 0 <= count <= MAX_PROMPT_LOGPROBS:
        rule = f"must be >= 0 and <= {MAX_PROMPT_LOGPROBS}"
        raise ValidationError(f"`prompt_logprobs` {rule}. Given: {count}", "prompt_logprobs")
    if count is not None and stream:
        raise ValidationError("`prompt_logprobs` is not supported when streaming tokens", "prompt_logprobs")
    if fields.has("stream_options") and not stream:
        raise ValidationError("`stream_options` needs `stream` to be true", "stream_options")
    options = fields.child("stream_options")
    usage, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    if continuous and not usage:
        raise ValidationError("`stream_options.continuous_usage_stats` needs `include_usage`", "stream_options")
    tier = fields.text("service_tier")
    if tier not in (None, *_TIERS):
        raise ValidationError(f"`service_tier` must be one of {', '.join(_TIERS)}", "service_tier")
    return ReportFields(
        fields.flag("details"),
        fields.flag("return_token_ids"),
        fields.flag("return_tokens_as_token_ids"),
        count,
        token_ids(fields, "logprob_token_ids", MAX_ALTERNATIVES),
        usage,
        continuous,
        read_metadata(fields),
        tier,
    )


def read_metadata(fields: Fields) -> dict[str, str] | None:
    """OpenAI's `metadata`. Raises WrongJsonType or ValidationError."""
    given = fields.mapping("metadata")
    if given is None:
        return None
    if len(given) > MAX_METADATA:
        raise ValidationError(f"`metadata` may have up to {MAX_METADATA} keys. Given: {len(given)}", "metadata")
    for key, value in given.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
            raise ValidationError(
                f"`metadata` has keys of up to {MAX_METADATA_KEY} characters, and texts of up to {MAX_METADATA_VALUE}",
                "metadata",
            )
    return given
