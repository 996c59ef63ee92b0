"""The URL of a running server, as the command-line tools take it."""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

PORT = 3000
"""The launcher's default port, which is LoRAX's."""
VARIABLE = "LORIKEET_URL"


def default(environment: Mapping[str, str] | None = None) -> str:
    """The server that a tool talks to without --url: LORIKEET_URL, else the launcher's default port on this machine."""
    url = (os.environ if environment is None else environment).get(VARIABLE, "").strip()
    return url or f"http://127.0.0.1:{PORT}"


def normalized(text: str) -> str:
    """`text` as an http or https URL without a slash at its end; `localhost:3000` and `:3000` are http.

    Raises ValueError with one sentence.
    """
    text = text.strip()
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    if url.startswith("http://:"):
        url = url.replace("//:", "//127.0.0.1:", 1)
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or " " in url:
        raise ValueError(f"{text!r} is not the URL of a server: give one such as http://127.0.0.1:{PORT}")
    return url
