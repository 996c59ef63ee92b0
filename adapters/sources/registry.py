"""All sources of one server by name. Imports no torch, and each source's library only when it is first used."""

import os

from lorikeet.adapters.errors import NotServed
from lorikeet.adapters.refs import Source
from lorikeet.adapters.sources.base import AdapterSource
from lorikeet.adapters.sources.hub import HubSource
from lorikeet.adapters.sources.local import LocalSource
from lorikeet.adapters.sources.s3 import S3Source
from lorikeet.adapters.sources.settings import SourceSettings


class Sources:
    """Hands out the source of a name. The router and the loader's process each have one."""

    def __init__(self, settings: SourceSettings) -> None:
        self._sources: dict[Source, AdapterSource] = {
            Source.HUB: HubSource(settings.hub_cache, settings.max_adapter_bytes, settings.notes),
            Source.LOCAL: LocalSource(settings.local_roots, settings.max_adapter_bytes, settings.hidden),
            Source.S3: S3Source(settings.max_adapter_bytes, os.environ),
        }

    def __getitem__(self, source: Source) -> AdapterSource:
        """Raises NotServed by name."""
        found = self._sources.get(source)
        if found is None:
            raise NotServed(f"adapters of the source `{source.value}` are not served by this server")
        return found

    async def close(self) -> None:
        for source in self._sources.values():
            await source.close()
