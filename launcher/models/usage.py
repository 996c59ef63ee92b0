"""Where usage records of finished requests go, from the settings and the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import refuse

URL_VARIABLE = "REQUEST_LOGGER_URL"


@dataclass(frozen=True)
class UsagePlan:
    """The destinations."""

    log: str | None = None
    url: str | None = field(default=None, repr=False)
    """It may contain credentials."""


def plan(settings: Settings, environment: Mapping[str, str]) -> UsagePlan:
    """Raises LauncherError, whose text never contains the URL."""
    path, url = settings["usage-log"], environment.get(URL_VARIABLE) or None
    if settings["log-texts"] and path is None and url is None:
        refuse(f"{settings.given['log-texts']} needs --usage-log or {URL_VARIABLE}: texts go to these only")
    if path is not None:
        path = os.path.abspath(path)
        if Path(path).is_dir() or not Path(path).parent.is_dir():
            refuse(f"{settings.given['usage-log']} {path} is not a file in an existing folder")
    if url is not None and not _is_url(url):
        refuse(f"{URL_VARIABLE} is not an http:// or https:// URL")
    return UsagePlan(path, url)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        return False
