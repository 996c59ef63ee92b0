"""The page at `/docs`: Swagger UI from files of this package, so that it works without access to other hosts."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

_FOLDER = Path(__file__).parent / "swagger"
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
"""The browser loads nothing from other hosts; Swagger UI sets styles of elements."""


async def _page(request: Request) -> Response:
    return FileResponse(_FOLDER / "index.html", headers={"content-security-policy": _POLICY})


def documentation_routes() -> list[BaseRoute]:
    """The page and its files."""
    return [Mount("/docs/assets", StaticFiles(directory=_FOLDER)), Route("/docs", _page)]
