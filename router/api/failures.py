"""Failures as answers: in the shape of the API that the request used."""

import enum

import orjson
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from lorikeet.router.answers import answer
from lorikeet.router.api.sse import event, named_event
from lorikeet.router.error_bodies import anthropic_body, failure_headers, lorax_body, openai_body
from lorikeet.router.errors import BodyRejected, RouterError


class ErrorStyle(enum.Enum):
    """Whose shape an error has."""

    LORAX = enum.auto()
    OPENAI = enum.auto()
    ANTHROPIC = enum.auto()


_ANTHROPIC_PATH = "/v1/messages"
_OPENAI_PATHS = ("/v1/", "/v2/", "/detokenize", "/tokenizer_info", "/adapters", "/pooling", "/score", "/rerank")


def style_of(scope: Scope) -> ErrorStyle:
    """By the path, unless the route has set `state.error_style`, because it serves several APIs."""
    given: ErrorStyle | None = scope.get("state", {}).get("error_style")
    return given or style_of_path(scope["path"])


def style_of_path(path: str) -> ErrorStyle:
    """Error style of the API that `path` belongs to."""
    if path.startswith(_ANTHROPIC_PATH):
        return ErrorStyle.ANTHROPIC
    return ErrorStyle.OPENAI if path.startswith(_OPENAI_PATHS) else ErrorStyle.LORAX


def failure_response(error: RouterError, scope: Scope) -> Response:
    """LoRAX's routes answer an unreadable body with plain text."""
    style = style_of(scope)
    row = answer(error)
    headers = failure_headers(error)
    if style is ErrorStyle.OPENAI:
        return Response(orjson.dumps(openai_body(error)), row.openai_status, headers, "application/json")
    if style is ErrorStyle.ANTHROPIC:
        body = anthropic_body(error) | {"request_id": scope["state"]["request_id"]}
        return Response(orjson.dumps(body), row.openai_status, headers, "application/json")
    if isinstance(error, BodyRejected):
        return PlainTextResponse(str(error), row.status, headers)
    return Response(orjson.dumps(lorax_body(error)), row.status, headers, "application/json")


def failure_event(error: RouterError, scope: Scope) -> bytes:
    """The same as the last event of a stream."""
    style = style_of(scope)
    if style is ErrorStyle.ANTHROPIC:
        return named_event(anthropic_body(error))
    return event(openai_body(error) if style is ErrorStyle.OPENAI else lorax_body(error))
