"""Where sources look and what they may take: one dataclass, part of the router's and the loader's configuration."""

from dataclasses import dataclass, fields
from typing import Any, Self

DEFAULT_MAX_ADAPTER_BYTES = 8 << 30


@dataclass(frozen=True)
class SourceSettings:
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what a configuration file holds. Raises ValueError that names unknown fields."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown fields of sources: {', '.join(unknown)}")
        settled: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**settled)
