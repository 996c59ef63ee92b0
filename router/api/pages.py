"""The pages at `/docs` (Swagger UI) and `/ui` (a playground and a live view), from files of this package.

They load nothing from other hosts. Links of `/ui`, which browsers get at `/` too, are relative, so that it works behind
a path prefix.
"""

import json
from pathlib import Path

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from lorikeet.proto.draft_sources import BY_VALUE, methods

_COMPRESSED = [Middleware(GZipMiddleware, compresslevel=6)]
_DOCS_FOLDER = Path(__file__).parent / "swagger"
_DOCS_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
"""The browser loads nothing from other hosts; Swagger UI sets styles of elements."""


async def _docs_page(request: Request) -> Response:
    return FileResponse(_DOCS_FOLDER / "index.html", headers={"content-security-policy": _DOCS_POLICY})


def documentation_routes() -> list[BaseRoute]:
    """The page and its files."""
    files = StaticFiles(directory=_DOCS_FOLDER)
    return [Mount("/docs/assets", files, middleware=_COMPRESSED), Route("/docs", _docs_page)]


PATH, FOLDER_PATH = "/ui", "/ui/assets/"
_FOLDER = Path(__file__).parent.parent / "ui"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class _Files(StaticFiles):
    """With a check whether they have changed at each use, so that page and scripts have one version."""

    def file_response(self, *arguments: object, **options: object) -> Response:
        response = super().file_response(*arguments, **options)  # type: ignore[arg-type]
        response.headers.update(_HEADERS)
        return response


def wants_page(request: Request) -> bool:
    """Whether a client of `/` asks for HTML before anything else, as browsers do."""
    accepted = request.headers.get("accept", "")
    return accepted.split(",")[0].partition(";")[0].strip().lower() in ("text/html", "application/xhtml+xml")


def is_page(request: Request) -> bool:
    """Whether the request is for the page or one of its files, which need no key."""
    path = request.scope["path"]
    if request.scope["method"] not in ("GET", "HEAD"):
        return False
    return path == PATH or path.startswith(FOLDER_PATH) or (path == "/" and wants_page(request))


async def page(request: Request) -> Response:
    """The page. Its relative links need a path without a slash at its end, or the root's."""
    raw = bytes(request.scope.get("raw_path") or b"").decode("latin-1")
    if request.scope["path"] == PATH and raw.endswith("/"):
        return RedirectResponse("../ui", headers=_HEADERS)
    if request.scope["path"] == "/" and raw and not raw.endswith("/"):
        return RedirectResponse(f"{raw.rpartition('/')[2]}/ui", headers=_HEADERS)
    return FileResponse(_FOLDER / "index.html", headers={**_HEADERS, "vary": "accept"})


def _script() -> str:
    sources = {"target": ["Model", "computed by the model itself"]}
    sources |= {row.name: [row.name.capitalize(), row.meaning] for row in BY_VALUE.values()}
    labels = {"auto": "Automatic", "off": "Off"} | {row.name: row.label for row in BY_VALUE.values()}
    names = [[method, labels[method]] for method in methods()]
    return f"export const SOURCES = {json.dumps(sources)};\nexport const METHODS = {json.dumps(names)};\n"


def _style() -> str:
    light = dark = rules = ""
    for name, colours in ((row.name, row.colours) for row in BY_VALUE.values()):
        light += f" --{name}: {colours.fill}; --{name}-line: {colours.line};"
        dark += f" --{name}: {colours.dark_fill}; --{name}-line: {colours.dark_line};"
        rules += (
            f".token.{name} {{ background: var(--{name}); box-shadow: inset 0 -2px var(--{name}-line); }}\n"
            f".swatch.{name} {{ background: var(--{name}); border-color: var(--{name}-line); }}\n"
            f".parts .{name} {{ background: var(--{name}-line); }}\n"
        )
    return f':root {{{light} }}\n:root[data-theme="dark"] {{{dark} }}\n{rules}'


async def sources_script(request: Request) -> Response:
    """Names of the draft sources and methods, for the page's scripts."""
    return Response(_script(), headers=_HEADERS, media_type="text/javascript")


async def sources_style(request: Request) -> Response:
    """Colours of the draft sources."""
    return Response(_style(), headers=_HEADERS, media_type="text/css")


def page_routes() -> list[BaseRoute]:
    """The page and its files."""
    made = [Route("/sources.js", sources_script), Route("/sources.css", sources_style)]
    files = [*made, Mount("/", _Files(directory=_FOLDER))]
    return [Mount(FOLDER_PATH.rstrip("/"), routes=files, middleware=_COMPRESSED), Route(PATH, page)]
