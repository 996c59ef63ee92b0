"""Flags, model download, processes and signals: starts router, loader and shards, which it does not import.

`launch` starts a server from Python; `Client` talks to one.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lorikeet.launcher.cli.client import Client
    from lorikeet.launcher.cli.launching import launch

__all__ = ["Client", "launch"]


def __getattr__(name: str) -> Any:
    """Imported on first use: the launcher itself needs neither."""
    if name == "launch":
        from lorikeet.launcher.cli.launching import launch

        return launch
    if name == "Client":
        from lorikeet.launcher.cli.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
