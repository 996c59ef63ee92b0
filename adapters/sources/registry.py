"""All sources of one server and their settings. Imports no torch, and each source's library only at its first use."""

import os
from dataclasses import dataclass

from lorikeet.adapters.errors import NotServed
from lorikeet.adapters.refs import Source
from lorikeet.adapters.sources.base import AdapterSource
from lorikeet.adapters.sources.hub import HubSource
from lorikeet.adapters.sources.local import LocalSource
from lorikeet.adapters.sources.s3 import S3Source
from lorikeet.proto.config_file import ConfigFile

DEFAULT_MAX_ADAPTER_BYTES = 8 << 30


@dataclass(frozen=True)
class SourceSettings(ConfigFile):
    """Where sources look and their size limit: part of the router's and of the loader's configuration."""

    local_roots: tuple[str, ...] = ()
    local_folders: tuple[str, ...] = ()
    """Folders of single adapters outside the roots, which the operator named."""
    hidden: tuple[str, ...] = ()
    """Folders that never contain local adapters, such as the adapter store."""
    hub_cache: str | None = None
    """None is the hub library's default."""
    notes: str | None = None
    """Folder that records which hub names were public; None records them in memory only."""
    max_adapter_bytes: int = DEFAULT_MAX_ADAPTER_BYTES
    """Weights of one adapter at its source."""
    strict: bool = False
    """Whether versions of local adapters are distinguished by all bytes of their files."""


class Sources:
    """The source for each name. The router and the loader's process have one instance each."""

    def __init__(self, settings: SourceSettings) -> None:
        self._sources: dict[Source, AdapterSource] = {
            Source.HUB: HubSource(settings.hub_cache, settings.max_adapter_bytes, settings.notes),
            Source.LOCAL: LocalSource(
                settings.local_roots,
                settings.max_adapter_bytes,
                settings.hidden,
                settings.local_folders,
                settings.strict,
            ),
            Source.S3: S3Source(settings.max_adapter_bytes, os.environ),
        }

    def __getitem__(self, source: Source) -> AdapterSource:
        """Raises NotServed with the name of the source."""
        if source not in self._sources:
            raise NotServed(f"adapters of the source `{source.value}` are not served by this server")
        return self._sources[source]

    @property
    def is_default_hub(self) -> bool:
        """Whether adapters of the source `hub` come from huggingface.co."""
        from huggingface_hub import constants

        return constants.ENDPOINT.rstrip("/") == "https://huggingface.co"

    async def close(self) -> None:
        for source in self._sources.values():
            await source.close()
