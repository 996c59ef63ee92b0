"""Where sources look and what they may take: one dataclass, part of the router's and the loader's configuration."""

from dataclasses import dataclass

from lorikeet.proto.config_file import ConfigFile

DEFAULT_MAX_ADAPTER_BYTES = 8 << 30


@dataclass(frozen=True)
class SourceSettings(ConfigFile):
    """Of one server. The loader and the router of one server are given the same."""

    local_roots: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Folders that are never a local adapter: where served adapters are kept."""
    hub_cache: str | None = None
    """None is the hub library's own."""
    notes: str | None = None
    """Folder where names that were public at the hub are remembered; None forgets them with the process."""
    max_adapter_bytes: int = DEFAULT_MAX_ADAPTER_BYTES
    """Weights of one adapter at its source."""
