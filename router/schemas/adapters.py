"""Adapter fields of a request: name, source, token, and merged adapters."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lorikeet.proto.params import MAX_MERGE_WEIGHT, MAX_MERGED
from lorikeet.router.errors import TokenInvalid, ValidationError
from lorikeet.router.requests.request import Merging
from lorikeet.router.schemas.model import F32, Body, Rejected, Rule, Texts, broken_rule, fail_fast

_PRUNING = ("ties", "dare_linear", "dare_ties")
_ELECTING = ("ties", "dare_ties")
_UNEQUAL = "number of adapter IDs must match number of adapter weights"

BASE_NAMES = ("__base_model__",)
"""Adapter names that stand for the base model, in addition to its id."""
OTHER_SERVERS = Rejected("is not supported by this server: use `adapter_id`", ("", [], {}, False))
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
    """The request's field of `name` or `merge`."""
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


_lower = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
Weight = Annotated[F32, Field(ge=-MAX_MERGE_WEIGHT, le=MAX_MERGE_WEIGHT)]
AdapterSource = Annotated[str, Field(json_schema_extra={"enum": ["hub", "local", "s3"]})]


class MergedAdapters(Body):
    """Several adapters merged into one, with the parameters of PEFT's `add_weighted_adapter`."""

    ids: Texts = Field(default_factory=list, description=f"1 to {MAX_MERGED} adapters")
    weights: Annotated[list[Weight], fail_fast] = Field(default_factory=list, description="As many as `ids`")
    merge_strategy: Annotated[Literal["linear", "ties", "dare_linear", "dare_ties", "cat"], _lower] = "linear"
    density: F32 | None = Field(None, description="Above 0 and at most 1; for ties, dare_linear and dare_ties")
    majority_sign_method: Annotated[Literal["total", "frequency"], _lower, Rule("must be one of total, frequency")] = (
        "total"
    )

    @model_validator(mode="before")
    @classmethod
    def _check_lengths(cls, values: Any) -> Any:
        """Before the elements, whatever they are."""
        lists = [values.get(name) for name in ("ids", "weights")] if isinstance(values, dict) else []
        num_ids, num_weights = ([len(items) if isinstance(items, list) else 0 for items in lists] or [0, 0])[:2]
        if num_ids and num_weights and num_ids != num_weights:
            raise broken_rule(_UNEQUAL, "merged_adapters")
        if (longer := max(num_ids, num_weights)) > MAX_MERGED:
            message = f"`adapters` supports up to {MAX_MERGED} adapters. Given: {longer}"
            raise broken_rule(message, "merged_adapters")
        return values

    def merge(self, adapter_id: str | None) -> MergeFields:
        """With LoRAX's rules and texts. Raises ValidationError."""
        if adapter_id is not None:
            raise ValidationError("at most one of `adapter_id` or `adapters` may be provided", "adapter_id")
        if not self.ids:
            raise ValidationError("at least one adapter ID must be provided when setting `adapters`", "merged_adapters")
        if len(self.ids) != len(self.weights):
            raise ValidationError(_UNEQUAL, "merged_adapters")
        density = self.density if self.merge_strategy in _PRUNING else None
        if self.merge_strategy in _PRUNING and (density is None or not 0.0 < density <= 1.0):
            raise ValidationError(f"`density` must be > 0 and <= 1 for {self.merge_strategy}", "density")
        merging = Merging(tuple(self.weights), self.merge_strategy, density, self.majority_sign_method)
        return MergeFields(tuple(self.ids), merging)

    def _unread(self) -> Iterator[str]:
        """Parameters of other strategies too. LoRAX's client sends a density of 0 with every strategy."""
        yield from super()._unread()
        if self.density and self.merge_strategy not in _PRUNING:
            yield "density"
        if self.majority_sign_method != "total" and self.merge_strategy not in _ELECTING:
            yield "majority_sign_method"


class LoraScale(Body):
    """One adapter of llama.cpp's `lora`."""

    id: Annotated[str, Field(min_length=1)] = Field(description="The adapter's name; llama.cpp's numbers are not known")
    scale: Weight = Field(1.0, description="Its weight")


def other_servers_fields(names: Iterable[str]) -> Iterator[str]:
    """Those of these names that are other servers' fields for adapters."""
    return (name for name in names if name.lower().startswith("lora") and name not in AdapterGroup.applied)


class AdapterGroup(Body):
    """The fields that name an adapter."""

    adapter_id: str | None = Field(
        None, description="An alias, or `id` or `id@revision` within the source; empty: the default adapter, if any"
    )
    adapter_source: AdapterSource | None = Field(None, description="Default: the server's")
    api_token: str | None = Field(
        None, repr=False, description="The source's token; default: that of the Authorization header"
    )
    merged_adapters: MergedAdapters | None = None
    lora: Annotated[list[LoraScale], fail_fast, Field(max_length=MAX_MERGED)] | None = Field(
        None, description="llama.cpp's: the sum of these adapters, `merged_adapters` with the strategy `cat`"
    )

    def unsupported(self) -> Iterator[tuple[str, Rejected]]:
        """Other servers' fields for adapters too: ignored, the base model would answer."""
        yield from super().unsupported()
        for name in other_servers_fields(self.model_extra or {}):
            if name not in self.rejected and OTHER_SERVERS.asks((self.model_extra or {})[name]):
                yield name, OTHER_SERVERS

    def merge(self, name: str | None) -> MergeFields | None:
        """The merged adapters, if any; `name` is that of one adapter. Raises ValidationError."""
        if not (scaled := [adapter for adapter in self.lora or () if adapter.scale]):
            return None if self.merged_adapters is None else self.merged_adapters.merge(name)
        if name is not None or self.merged_adapters is not None:
            raise ValidationError("at most one of `adapter_id`, `merged_adapters` or `lora` may be provided", "lora")
        weights = tuple(adapter.scale for adapter in scaled)
        return MergeFields(tuple(adapter.id for adapter in scaled), Merging(weights, "cat", None, "total"))

    def adapter(self) -> AdapterFields:
        """The adapter by LoRAX's fields. Raises ValidationError."""
        merge = self.merge(self.adapter_id)
        return AdapterFields(
            self.adapter_id, self.adapter_source, self.api_token, merge, field=self._adapter_field(merge)
        )

    def _adapter_field(self, merge: MergeFields | None) -> str:
        """The field that names the adapter, or those of a merge."""
        return "adapter_id" if merge is None else "merged_adapters" if self.merged_adapters else "lora"

    def adapter_or(self, model: str, base_names: tuple[str, ...], user: str | None) -> AdapterFields:
        """The adapter by LoRAX's fields if they are set, else by OpenAI's `model`. Raises ValidationError where two
        different ones are named; `base_names` are those of the base model.
        """
        name = self.adapter_id or None
        merge = self.merge(name)
        if not name and merge is None:
            return AdapterFields(model, self.adapter_source, self.api_token, is_model=True, user=user)
        field_name = self._adapter_field(merge)
        if model not in ("", name, *base_names, *BASE_NAMES):
            raise ValidationError(f"`model` must be the base model, since `{field_name}` names the adapter", "model")
        return AdapterFields(name, self.adapter_source, self.api_token, merge, field=field_name, user=user)


class GeneratingAdapterGroup(AdapterGroup):
    """The fields that name the adapters of an output."""

    heads_id: str | None = Field(None, description="An adapter whose Medusa heads are used; named like `adapter_id`")
    adapter_name = adapter_parameters = lora_path = OTHER_SERVERS

    def heads(self) -> AdapterFields:
        """The adapter of `heads_id`; source and token are the adapter's."""
        return AdapterFields(self.heads_id, self.adapter_source, self.api_token, field="heads_id")


class AdapterName(Body):
    """An adapter, named as in requests."""

    adapter_id: str
    adapter_source: AdapterSource | None = None


class AdapterUnload(AdapterName):
    """The body of `/admin/adapters/unload`."""

    disk: bool = Field(False, description="Also deletes its file in the store")


class AdapterRefresh(Body):
    """The body of `/admin/adapters/refresh`."""

    adapter_id: str | None = Field(None, description="Default: all")
    adapter_source: AdapterSource | None = None


class LoadLora(Body):
    """vLLM's body of `/v1/load_lora_adapter`."""

    lora_name: str = ""
    lora_path: str = Field("", description="A folder, or an id as in requests")
    load_inplace: bool = False


class UnloadLora(Body):
    """vLLM's body of `/v1/unload_lora_adapter`."""

    lora_name: str = ""


class SageMakerAdapter(Body):
    """SageMaker's body of `/adapters`."""

    name: str = ""
    src: str = Field("", description="A folder, or an id as in requests")
    load_inplace: bool = False
