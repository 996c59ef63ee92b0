"""Failures as answers: in the shape of the API that the request used."""

import enum

import orjson
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from lorikeet.router.answers import answer
from lorikeet.router.error_bodies import failure_headers, lorax_body, openai_body
from lorikeet.router.errors import BodyRejected, RouterError


class ErrorStyle(enum.Enum):
    """Whose shape an error has."""

    LORAX = enum.auto()
    OPENAI = enum.auto()


_OPENAI_PATHS = ("/v1/", "/detokenize", "/tokenizer_info", "/adapters")


def style_of(scope: Scope) -> ErrorStyle:
    """By the path, unless the route has set `state.error_style`, because it serves several APIs."""
    given: ErrorStyle | None = scope.get("state", {}).get("error_style")
    return given or style_of_path(scope["path"])


def style_of_path(path: str) -> ErrorStyle:
    """Of routes of one API."""
    return ErrorStyle.OPENAI if path.startswith(_OPENAI_PATHS) else ErrorStyle.LORAX


def failure_response(error: RouterError, style: ErrorStyle) -> Response:
    """LoRAX's routes answer an unreadable body with plain text."""
    row = answer(error)
    headers = failure_headers(error)
    if style is ErrorStyle.OPENAI:
        return Response(orjson.dumps(openai_body(error)), row.openai_status, headers, "application/json")
    if isinstance(error, BodyRejected):
        return PlainTextResponse(str(error), row.status, headers)
    return Response(orjson.dumps(lorax_body(error)), row.status, headers, "application/json")
