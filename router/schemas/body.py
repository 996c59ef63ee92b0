"""Reads the body of a request as a JSON object: media type, size limit, UTF-8 and syntax."""

import re
import time
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from lorikeet.router.errors import BodyTooLarge, NotJson, WrongJsonType, WrongMediaType

_JSON_MEDIA_TYPE = re.compile(r"application/(?:[\w.!#$&^-]+\+)?json\s*(?:;|$)", re.IGNORECASE)

_DISCARD_BYTES = 64 * 1024 * 1024
_DISCARD_SECONDS = 30.0


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises one leaf of BodyRejected, or ClientDisconnect."""
    if not _JSON_MEDIA_TYPE.match(request.headers.get("content-type", "")):
        raise WrongMediaType()
    body = await _read(request, max_bytes)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # The exception object holds the whole document, so only its text is kept.
        raise NotJson(str(error)) from None
    if not isinstance(value, dict):
        raise WrongJsonType(f"invalid type: {kind_of(value)}, expected a JSON object")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    """Collect the body without holding more than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        await _discard(request)
        raise BodyTooLarge()
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        part = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        if size > max_bytes:
            if more:
                parts.clear()
                await _discard(request)
            raise BodyTooLarge()
        parts.append(part)
    return b"".join(parts)


async def _discard(request: Request) -> None:
    """Read the rest for a while: closing on unread bytes resets the connection before the client reads the answer."""
    size = 0
    deadline = time.monotonic() + _DISCARD_SECONDS
    while size < _DISCARD_BYTES and time.monotonic() < deadline:
        message = await request.receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def kind_of(value: object) -> str:
    """How serde names a value of the wrong type."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{value}`"
        case str():
            shown = value if len(value) <= 64 else value[:64] + "…"
            return f'string "{shown}"'
        case list():
            return "sequence"
    return "map"
