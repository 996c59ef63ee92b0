"""The page at `/ui`, and at `/` for browsers: a playground and a live view, from files of this package.

Links in it are relative, so that it works behind a path prefix; it loads nothing from other hosts.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

PATH, FOLDER_PATH = "/ui", "/ui/assets/"
_FOLDER = Path(__file__).parent.parent / "ui"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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


def page_routes() -> list[BaseRoute]:
    """The page and its files."""
    return [Mount(FOLDER_PATH.rstrip("/"), _Files(directory=_FOLDER)), Route(PATH, page)]
