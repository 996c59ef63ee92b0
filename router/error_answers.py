"""The HTTP answer of each failure: a table from the leaves of errors.py to statuses and codes, and the error bodies."""

import re
from dataclasses import dataclass
from typing import Any

from lorikeet.router import errors


@dataclass(frozen=True)
class ErrorAnswer:
    """Answer to one error: LoRAX's status and `error_type`, its name in metrics, OpenAI's status, `type` and `code`."""

    status: int
    error_type: str
    counted_as: str
    openai_status: int
    openai_type: str = "invalid_request_error"
    openai_code: str | None = None


ANSWERS: dict[type[errors.RouterError], ErrorAnswer] = {
    errors.NotJson: ErrorAnswer(400, "invalid_json", "bad_request", 400),
    errors.WrongJsonType: ErrorAnswer(422, "invalid_type", "bad_request", 400),
    errors.WrongMediaType: ErrorAnswer(415, "unsupported_media_type", "bad_request", 415),
    errors.BodyTooLarge: ErrorAnswer(413, "payload_too_large", "bad_request", 413),
    errors.BodyTooDetailed: ErrorAnswer(413, "payload_too_large", "bad_request", 413),
    errors.BodyTimeout: ErrorAnswer(408, "timeout", "bad_request", 408),
    errors.BadContentEncoding: ErrorAnswer(400, "invalid_encoding", "bad_request", 400),
    errors.UnsupportedContentEncoding: ErrorAnswer(415, "unsupported_content_encoding", "bad_request", 415),
    errors.ValidationError: ErrorAnswer(422, "validation", "validation", 400),
    errors.TooManyTokens: ErrorAnswer(413, "validation", "validation", 413, openai_code="context_length_exceeded"),
    errors.WrongTask: ErrorAnswer(422, "wrong_task", "validation", 400, openai_code="wrong_task"),
    errors.TokenInvalid: ErrorAnswer(422, "validation", "validation", 422, openai_code="invalid_token"),
    errors.UnsupportedField: ErrorAnswer(422, "validation", "validation", 422),
    errors.ToolError: ErrorAnswer(422, "tool_error", "tool", 400, openai_code="tool_error"),
    errors.ChatTemplateError: ErrorAnswer(422, "template_error", "template", 400),
    errors.ModelNotFound: ErrorAnswer(404, "model_not_found", "validation", 404, openai_code="model_not_found"),
    errors.StreamNotFound: ErrorAnswer(404, "not_found", "bad_request", 404, openai_code="stream_not_found"),
    errors.StreamExists: ErrorAnswer(409, "conflict", "bad_request", 409, openai_code="stream_exists"),
    errors.StreamTrimmed: ErrorAnswer(410, "gone", "bad_request", 410, openai_code="stream_trimmed"),
    errors.ResponseNotFound: ErrorAnswer(404, "not_found", "validation", 404),
    errors.UnknownRoute: ErrorAnswer(404, "not_found", "bad_request", 404, openai_code="unknown_url"),
    errors.UnknownMethod: ErrorAnswer(405, "method_not_allowed", "bad_request", 405),
    errors.AdapterUnknown: ErrorAnswer(404, "generation", "download_adapter", 404, openai_code="model_not_found"),
    errors.AdapterUnauthorized: ErrorAnswer(
        401, "generation", "download_adapter", 401, "authentication_error", "invalid_api_key"
    ),
    errors.AdapterForbidden: ErrorAnswer(
        403, "generation", "download_adapter", 403, "permission_error", "adapter_not_allowed"
    ),
    errors.AdapterRefused: ErrorAnswer(422, "generation", "load_adapter", 422, openai_code="adapter_refused"),
    errors.AdapterUnavailable: ErrorAnswer(
        503, "generation", "download_adapter", 503, "server_error", "adapter_source_unavailable"
    ),
    errors.AdapterSourceInvalid: ErrorAnswer(
        502, "generation", "download_adapter", 502, "server_error", "adapter_source_invalid"
    ),
    errors.AdapterLoadFailed: ErrorAnswer(
        500, "generation", "load_adapter", 500, "server_error", "adapter_load_failed"
    ),
    errors.AdminOnly: ErrorAnswer(403, "forbidden", "bad_request", 403, "permission_error", "admin_only"),
    errors.KeyRequired: ErrorAnswer(401, "unauthorized", "bad_request", 401, openai_code="invalid_api_key"),
    errors.HostNotAllowed: ErrorAnswer(421, "host_not_allowed", "bad_request", 421, openai_code="host_not_allowed"),
    errors.ForeignPage: ErrorAnswer(403, "forbidden", "bad_request", 403, "permission_error", "foreign_page"),
    errors.TooManyFailedKeys: ErrorAnswer(429, "unauthorized", "bad_request", 429, "requests", "rate_limit_exceeded"),
    errors.AlreadyLoaded: ErrorAnswer(400, "validation", "validation", 400),
    errors.ReloadRefused: ErrorAnswer(409, "validation", "validation", 409),
    errors.Overloaded: ErrorAnswer(429, "overloaded", "overloaded", 429, "requests", "rate_limit_exceeded"),
    errors.TooManyStreams: ErrorAnswer(429, "overloaded", "overloaded", 429, "requests", "rate_limit_exceeded"),
    errors.BodyMemoryFull: ErrorAnswer(503, "overloaded", "overloaded", 503, "server_error", "overloaded"),
    errors.KeyLimitReached: ErrorAnswer(429, "overloaded", "overloaded", 429, "requests", "rate_limit_exceeded"),
    errors.ShuttingDown: ErrorAnswer(503, "shutting_down", "shutting_down", 503, "server_error", "shutting_down"),
    errors.NoShard: ErrorAnswer(503, "unavailable", "unavailable", 503, "server_error", "unavailable"),
    errors.ModelLoading: ErrorAnswer(503, "unavailable", "unavailable", 503, "server_error", "model_loading"),
    errors.Unhealthy: ErrorAnswer(503, "healthcheck", "unavailable", 503, "server_error", "unhealthy"),
    errors.RouteNotServed: ErrorAnswer(501, "not_implemented", "bad_request", 501, "server_error", "not_implemented"),
    errors.GenerationFailed: ErrorAnswer(424, "generation", "generation", 500, "server_error", "generation_failed"),
    errors.PoisonRequest: ErrorAnswer(
        500, "request_crashes_shard", "generation", 500, "server_error", "request_crashes_shard"
    ),
    errors.IncompleteGeneration: ErrorAnswer(
        500, "incomplete_generation", "incomplete", 500, "server_error", "incomplete_generation"
    ),
    errors.DeadlineExceeded: ErrorAnswer(504, "timeout", "timeout", 504, "server_error", "timeout"),
    errors.AnswerTooLarge: ErrorAnswer(
        413, "answer_too_large", "generation", 413, "invalid_request_error", "answer_too_large"
    ),
    errors.InternalError: ErrorAnswer(500, "internal", "internal", 500, "server_error", "internal_error"),
}


def answer(error: errors.RouterError) -> ErrorAnswer:
    """The row of the table for `error`, by its class or the nearest ancestor that has one."""
    for ancestor in type(error).__mro__:
        row = ANSWERS.get(ancestor)
        if row is not None:
            return row
    raise LookupError(f"{type(error).__name__} has no answer")


MAX_RETRY_AFTER_S = 3600.0


def reason(error: errors.RouterError) -> str:
    """The leaf of the tree in snake_case, for the access log: `body_too_large`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


def lorax_body(error: errors.RouterError) -> dict[str, Any]:
    """`{"error", "error_type"}`, also the data of a stream's error event."""
    return {"error": str(error), "error_type": answer(error).error_type}


def openai_body(error: errors.RouterError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    row = answer(error)
    message = (
        error.message
        if isinstance(error, errors.ValidationError | errors.ToolError | errors.AdapterProblem)
        else str(error)
    )
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


def anthropic_body(error: errors.RouterError) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}}`, also the data of a stream's error event."""
    status = answer(error).openai_status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": openai_body(error)["error"]["message"]}}


def failure_headers(error: errors.RouterError) -> dict[str, str]:
    """Headers about authentication, retries and closing the connection."""
    headers = {}
    if isinstance(error, errors.AdapterUnauthorized | errors.KeyRequired):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after is not None:
        headers["retry-after"] = str(round(min(MAX_RETRY_AFTER_S, max(1.0, error.retry_after))))
    if isinstance(error, errors.UnsupportedContentEncoding):
        headers["accept-encoding"] = "gzip, identity"
    if isinstance(error, errors.ShuttingDown | errors.BodyTooLarge | errors.BodyTimeout):
        headers["connection"] = "close"
    return headers
