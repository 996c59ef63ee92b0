"""From a request's words to its adapter: which one is meant, which version, and whether this caller may use it.

Knows names and rights; what an adapter holds is for the loader to say.
"""

import asyncio

from adapters import refs
from adapters.errors import AdapterError, AdapterNotFound
from adapters.pin import Pin
from adapters.refs import Ref, Source
from adapters.rights import Rights
from router.adapter import Adapter
from router.config import RouterConfig
from router.errors import ModelNotFound, UnsupportedField, ValidationError, adapter_problem
from router.schemas.adapters import AdapterFields, MergeFields

BASE_NAMES = ("__base_model__",)
_SERVED = (Source.HUB, Source.LOCAL, Source.S3)
_BASE_ONLY = "is not supported by this server, which serves its base model alone"


class Selection:
    """Of one router."""

    def __init__(self, config: RouterConfig, rights: Rights | None) -> None:
        """Without `rights` the base model is served alone."""
        self._config = config
        self._rights = rights
        self._operators: dict[Ref, None] = {}
        """Adapters that the operator named: the operator's token opens them to every caller."""
        if config.adapter_id is not None:
            self._operators[refs.parse(config.adapter_id, Source(config.adapter_source))] = None
        source = Source(config.preloaded_adapter_source or config.adapter_source)
        for name in config.preloaded_adapter_ids:
            self._operators[refs.parse(name, source)] = None

    async def choose(self, fields: AdapterFields, bearer: str | None) -> Adapter | None:
        """None for the bare base model. Raises ModelNotFound, ValidationError or a leaf of AdapterProblem."""
        if fields.merge is None and self._is_base(fields):
            return None
        if self._rights is None:
            raise self._base_only(fields)
        token = fields.token or bearer or (self._config.hub_token if self._config.use_hub_token_for_all else None)
        try:
            if fields.merge is not None:
                return await self._merged(fields.merge, self._source(fields.source), token)
            ref = self._ref(fields)
            token = self._config.hub_token if ref in self._operators else token
            return Adapter(str(ref), (await self._pin(ref, token),), token=token)
        except AdapterNotFound as error:
            if fields.is_model:
                raise ModelNotFound((fields.name or "")[:256], str(error)) from None
            raise adapter_problem(error) from None
        except AdapterError as error:
            raise adapter_problem(error) from None

    def _is_base(self, fields: AdapterFields) -> bool:
        if not fields.name:
            return self._config.adapter_id is None
        return fields.name == self._config.model_id or fields.name in BASE_NAMES

    def _base_only(self, fields: AdapterFields) -> Exception:
        if fields.is_model:
            return ModelNotFound((fields.name or "")[:256])
        if fields.merge is not None:
            return UnsupportedField("merged_adapters")
        return UnsupportedField("adapter_id", _BASE_ONLY)

    def _ref(self, fields: AdapterFields) -> Ref:
        if not fields.name:
            assert self._config.adapter_id is not None
            return refs.parse(self._config.adapter_id, Source(self._config.adapter_source))
        return self._parsed(fields.name, self._source(fields.source), fields.is_model)

    def _parsed(self, name: str, source: Source, is_model: bool) -> Ref:
        try:
            return refs.parse(name, source)
        except ValueError as error:
            if is_model:
                raise ModelNotFound(name[:256], str(error)) from None
            raise ValidationError(str(error), "adapter_id") from None

    def _source(self, given: str | None) -> Source:
        """Raises ValidationError by name."""
        name = given or self._config.default_adapter_source or self._config.adapter_source
        if name == Source.PBASE:
            raise ValidationError(
                "`adapter_source` pbase is not served: Predibase's service is closed to it", "adapter_source"
            )
        if name not in _SERVED:
            shown = ", ".join(source.value for source in _SERVED)
            raise ValidationError(f"`adapter_source` must be one of {shown}", "adapter_source")
        return Source(name)

    async def _merged(self, merge: MergeFields, source: Source, token: str | None) -> Adapter:
        for name in merge.ids:
            if not name or name == self._config.model_id or name in BASE_NAMES:
                raise ValidationError("Base model adapter cannot be merged.", "merged_adapters")
        wanted = [self._parsed(name, source, is_model=False) for name in merge.ids]
        pins = await asyncio.gather(*(self._pin(ref, token) for ref in wanted))
        return Adapter(",".join(map(str, wanted)), tuple(pins), merge.merging, token)

    async def _pin(self, ref: Ref, token: str | None) -> Pin:
        assert self._rights is not None
        return (await self._rights.resolve(ref, token)).pin
