"""Errors as bodies, headers and words of the log, in the shape of each API."""

import re
from typing import Any

from lorikeet.router.answers import answer
from lorikeet.router.errors import (
    AdapterProblem,
    AdapterUnauthorized,
    BodyTimeout,
    BodyTooLarge,
    KeyRequired,
    RouterError,
    ShuttingDown,
    ToolError,
    UnsupportedContentEncoding,
    ValidationError,
)

MAX_RETRY_AFTER_S = 3600.0


def reason(error: RouterError) -> str:
    """The leaf of the tree in snake_case, for the access log: `body_too_large`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


def lorax_body(error: RouterError) -> dict[str, Any]:
    """`{"error", "error_type"}`, also the data of a stream's error event."""
    return {"error": str(error), "error_type": answer(error).error_type}


def openai_body(error: RouterError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    row = answer(error)
    message = error.message if isinstance(error, ValidationError | ToolError | AdapterProblem) else str(error)
    code = error.code or row.openai_code
    return {"error": {"message": message, "type": row.openai_type, "param": error.param, "code": code}}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: RouterError) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}}`, also the data of a stream's error event."""
    status = answer(error).openai_status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": openai_body(error)["error"]["message"]}}


def failure_headers(error: RouterError) -> dict[str, str]:
    """Headers about authentication, retries and closing the connection."""
    headers = {}
    if isinstance(error, AdapterUnauthorized | KeyRequired):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after is not None:
        headers["retry-after"] = str(round(min(MAX_RETRY_AFTER_S, max(1.0, error.retry_after))))
    if isinstance(error, UnsupportedContentEncoding):
        headers["accept-encoding"] = "gzip, identity"
    if isinstance(error, ShuttingDown | BodyTooLarge | BodyTimeout):
        headers["connection"] = "close"
    return headers
