"""Flags, download, processes, readiness, signals. Starts router and shards as processes; imports neither.

`launch` and its `Client` are here for those who start a server from Python.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lorikeet.launcher.cli.client import Client
    from lorikeet.launcher.cli.launching import launch

__all__ = ["Client", "launch"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: a start of the launcher itself needs neither."""
    if name == "launch":
        from lorikeet.launcher.cli.launching import launch

        return launch
    if name == "Client":
        from lorikeet.launcher.cli.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
