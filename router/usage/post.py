"""Posts usage records as LoRAX's events. No message holds the credentials of the URL."""

import base64
import http.client
import ssl
import time
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import orjson

from lorikeet.router.usage.record import Unwritten, UsageRecord

TIMEOUT_S = 5.0
RETRY_DELAYS_S = (0.1, 0.4, 1.6)
"""Before each attempt after the first."""


class UsagePost:
    """One connection, kept open; redirects are not followed."""

    def __init__(self, url: str) -> None:
        """Raises ValueError, whose text does not hold the URL."""
        parts = _parts(url)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"content-type": "application/json", **_authorization(parts)}
        self._connection = _connection(parts)

    def write(self, record: UsageRecord) -> None:
        """Raises Unwritten after the last attempt."""
        body = orjson.dumps(event(record))
        for delay in (*RETRY_DELAYS_S, None):
            try:
                self._send(body)
                return
            except _Retryable:
                if delay is None:
                    raise
                time.sleep(delay)

    def _send(self, body: bytes) -> None:
        """Raises Unwritten, as _Retryable where another attempt may succeed."""
        try:
            self._connection.request("POST", self._target, body, self._headers)
            response = self._connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise _Retryable(f"REQUEST_LOGGER_URL: {_reason(error)}") from None
        if response.status >= 500 or response.status == 429:
            raise _Retryable(f"REQUEST_LOGGER_URL answered {response.status}")
        if response.status >= 300:
            raise Unwritten(f"REQUEST_LOGGER_URL answered {response.status}")

    def reopen(self) -> None:
        """There is nothing to reopen."""

    def close(self) -> None:
        self._connection.close()


class _Retryable(Unwritten):
    """A failure that may be temporary."""


def event(record: UsageRecord) -> dict[str, Any]:
    """LoRAX's keys. `api_token` is always null, so that no caller's token leaves the server."""
    return {
        "tokens": record.prompt_tokens + record.generated_tokens,
        "adapter_id": record.adapter or "",
        "input": record.input,
        "output": record.output,
        "api_token": None,
        "model_id": record.model,
    }


def shown_url(url: str) -> str:
    """`url` without user, password, query and fragment, any of which may be a secret."""
    parts = _parts(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path}"


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # its text quotes the invalid part, which may be that of a password
        is_one = False
    if not is_one:
        raise ValueError("REQUEST_LOGGER_URL must be an http:// or https:// URL")
    return parts


def _authorization(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def _connection(parts: SplitResult) -> http.client.HTTPConnection:
    assert parts.hostname is not None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)


def _reason(error: Exception) -> str:
    """Not the error's text, which may quote what the other side sent."""
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
