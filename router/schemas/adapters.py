"""What a request says of adapters: names, source, token, and several that become one. Knows no source."""

from dataclasses import dataclass, field
from typing import Any

from lorikeet.router.errors import ValidationError
from lorikeet.router.requests.adapter_ref import Merging
from lorikeet.router.schemas.fields import Fields

STRATEGIES = ("linear", "ties", "dare_linear", "dare_ties", "cat")
SIGN_METHODS = ("total", "frequency")
_PRUNING = ("ties", "dare_linear", "dare_ties")
MOST_MERGED = 32


BASE_NAMES = ("__base_model__",)
"""What stands for the bare base where an adapter is named, beside the base's own id."""


@dataclass(frozen=True)
class MergeFields:
    """`merged_adapters`, checked."""

    ids: tuple[str, ...]
    merging: Merging


@dataclass(frozen=True)
class AdapterFields:
    """One request's words on its adapter. Names are as written; empty and None ask for the default."""

    name: str | None = None
    source: str | None = None
    token: str | None = field(default=None, repr=False)
    merge: MergeFields | None = None
    is_model: bool = False
    """Whether `name` was OpenAI's `model`."""
    field: str = "adapter_id"
    """The request's word for `name`."""
    user: str | None = None
    """OpenAI's `user`: who always gets the same version of a roll-out."""


def read_merge(value: dict[str, Any] | None, adapter_id: str | None) -> MergeFields | None:
    """LoRAX's rules and texts where it has them. Raises WrongJsonType or ValidationError."""
    if value is None:
        return None
    fields = Fields(value, "parameters.merged_adapters.")
    ids, weights = fields.texts("ids"), fields.numbers("weights")
    strategy = (fields.text("merge_strategy") or "linear").lower()
    density = fields.number("density")
    sign_method = (fields.text("majority_sign_method") or "total").lower()
    if adapter_id is not None:
        raise ValidationError("at most one of `adapter_id` or `adapters` may be provided", "adapter_id")
    if not ids:
        raise ValidationError("at least one adapter ID must be provided when setting `adapters`", "merged_adapters")
    if len(ids) != len(weights):
        raise ValidationError("number of adapter IDs must match number of adapter weights", "merged_adapters")
    if len(ids) > MOST_MERGED:
        raise ValidationError(f"`adapters` supports up to {MOST_MERGED} adapters. Given: {len(ids)}", "merged_adapters")
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
