"""Where ended requests are told to, worked out from the settings and the environment before a process starts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import Exit, LauncherError

URL_VARIABLE = "REQUEST_LOGGER_URL"


@dataclass(frozen=True)
class UsagePlan:
    """What the router is told."""

    log: str | None = None
    url: str | None = field(default=None, repr=False)
    """It may hold credentials."""


def plan(settings: Settings, environment: Mapping[str, str]) -> UsagePlan:
    """Raises LauncherError, which never holds the URL."""
    path, url = settings["usage-log"], environment.get(URL_VARIABLE) or None
    if settings["log-texts"] and path is None and url is None:
        _refuse(f"{settings.given['log-texts']} needs --usage-log or {URL_VARIABLE}: texts go nowhere else")
    if path is not None:
        path = os.path.abspath(path)
        if Path(path).is_dir() or not Path(path).parent.is_dir():
            _refuse(f"{settings.given['usage-log']} {path} is no file in a folder that exists")
    if url is not None and not _is_url(url):
        _refuse(f"{URL_VARIABLE} is no http:// or https:// URL")
    return UsagePlan(path, url)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        return False


def _refuse(sentence: str) -> None:
    raise LauncherError(Exit.ARGUMENT_VALIDATION, sentence)
