"""Cross-origin requests: the headers of every answer to a browser, and the answers to preflight requests.

Starlette decides; its middleware is not in the path, because it would cost a stream one call per token, and would miss
the answers that are given outside of it.
"""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorikeet.router.config import RouterConfig

_METHODS = ("GET", "POST")


class Cors:
    """The rules of one router."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ValueError for rules that would let any site use a visitor's credentials."""
        origins = config.cors_allow_origin or ("*",)
        if config.cors_allow_credentials and "*" in origins:
            raise ValueError("cors_allow_credentials needs cors_allow_origin: else any site could use a visitor's")
        self._rules = CORSMiddleware(
            _nothing,
            allow_origins=origins,
            allow_methods=config.cors_allow_method or _METHODS,
            allow_headers=config.cors_allow_header or ("*",),
            expose_headers=config.cors_expose_header,
            allow_credentials=bool(config.cors_allow_credentials),
        )
        simple = self._rules.simple_headers.items()
        self._simple = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in simple]

    def headers(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        """To add to an answer."""
        depends = [] if self._rules.allow_all_origins else [(b"vary", b"Origin")]
        if origin is None:
            return depends
        if self._rules.allow_all_origins or not self._rules.is_allowed_origin(origin):
            return [*self._simple, *depends]
        return [*self._simple, (b"access-control-allow-origin", origin.encode("latin-1")), *depends]

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a preflight request, None for any other request."""
        if scope["method"] != "OPTIONS":
            return None
        headers = Headers(scope=scope)
        is_preflight = "origin" in headers and "access-control-request-method" in headers
        return self._rules.preflight_response(headers) if is_preflight else None


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """The middleware's application, which is never called."""
