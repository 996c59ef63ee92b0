"""Adapter fields of a request: name, source, token, and merged adapters."""

from dataclasses import dataclass, field

from lorikeet.router.errors import TokenInvalid, ValidationError
from lorikeet.router.requests.adapter_ref import Merging
from lorikeet.router.schemas.fields import Fields

STRATEGIES = ("linear", "ties", "dare_linear", "dare_ties", "cat")
SIGN_METHODS = ("total", "frequency")
_MERGE_FIELDS = ("ids", "weights", "merge_strategy", "density", "majority_sign_method")
_PRUNING = ("ties", "dare_linear", "dare_ties")
MAX_MERGED = 32
_UNEQUAL = "number of adapter IDs must match number of adapter weights"

BASE_NAMES = ("__base_model__",)
"""Adapter names that stand for the base model, in addition to its id."""
MAX_TOKEN = 4096
"""Characters of a source's token; those of the Hugging Face hub have 37."""


@dataclass(frozen=True)
class MergeFields:
    """`merged_adapters`, checked."""

    ids: tuple[str, ...]
    merging: Merging


@dataclass(frozen=True)
class AdapterFields:
    """The adapter of one request, as written; an empty name and None mean the default."""

    name: str | None = None
    source: str | None = None
    token: str | None = field(default=None, repr=False)
    merge: MergeFields | None = None
    is_model: bool = False
    """Whether `name` was OpenAI's `model`."""
    field: str = "adapter_id"
    """The request's field of `name`."""
    user: str | None = None
    """OpenAI's `user`, which always gets the same version of a roll-out."""


def checked_token(token: str | None, name: str) -> str | None:
    """`token`, for a header of a request to an adapter's source. `name` is for the message. Raises TokenInvalid."""
    if token is None:
        return None
    if len(token) > MAX_TOKEN:
        raise TokenInvalid(f"{name} has {len(token)} characters; a token has at most {MAX_TOKEN}", "api_token")
    if not all("!" <= character <= "~" for character in token):
        raise TokenInvalid(f"{name} must consist of printable ASCII characters without spaces", "api_token")
    return token


def merge_child(fields: Fields) -> Fields | None:
    """`merged_adapters` of a body, whose fields `read_merge` reads. Raises WrongJsonType."""
    if not fields.has("merged_adapters"):
        fields.take("merged_adapters")  # null is absence
        return None
    child = fields.child("merged_adapters")
    child.expect(*_MERGE_FIELDS)
    return child


def read_merge(fields: Fields | None, adapter_id: str | None) -> MergeFields | None:
    """`merged_adapters`, with LoRAX's rules and texts, lengths first. Raises WrongJsonType or ValidationError."""
    if fields is None:
        return None
    _check_num_merged(fields)
    ids, weights = fields.texts("ids"), fields.numbers("weights")
    strategy = (fields.text("merge_strategy") or "linear").lower()
    density = fields.number("density")
    sign_method = (fields.text("majority_sign_method") or "total").lower()
    if adapter_id is not None:
        raise ValidationError("at most one of `adapter_id` or `adapters` may be provided", "adapter_id")
    if not ids:
        raise ValidationError("at least one adapter ID must be provided when setting `adapters`", "merged_adapters")
    if len(ids) != len(weights):
        raise ValidationError(_UNEQUAL, "merged_adapters")
    if strategy not in STRATEGIES:
        raise ValidationError(f"`merge_strategy` must be one of {', '.join(STRATEGIES)}", "merge_strategy")
    if sign_method not in SIGN_METHODS:
        raise ValidationError(
            f"`majority_sign_method` must be one of {', '.join(SIGN_METHODS)}", "majority_sign_method"
        )
    if strategy not in _PRUNING:
        density = None
    elif density is None or not 0.0 < density <= 1.0:
        raise ValidationError(f"`density` must be > 0 and <= 1 for {strategy}", "density")
    return MergeFields(tuple(ids), Merging(tuple(weights), strategy, density, sign_method))


def _check_num_merged(fields: Fields) -> None:
    """Values of other types are left to the reader."""
    num_ids, num_weights = fields.length("ids"), fields.length("weights")
    if num_ids and num_weights and num_ids != num_weights:
        raise ValidationError(_UNEQUAL, "merged_adapters")
    longer = max(num_ids, num_weights)
    if longer > MAX_MERGED:
        message = f"`adapters` supports up to {MAX_MERGED} adapters. Given: {longer}"
        raise ValidationError(message, "merged_adapters")
