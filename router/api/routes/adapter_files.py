"""Routes that take the files of an adapter from an administrator, one after the other, into a local root.

They are received into a hidden folder, which is renamed to the adapter's name once all are there.
"""

import asyncio
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.adapters.sources.base import HEADS, SMALL_NAMES, WEIGHTS
from lorikeet.adapters.sources.listed import ARRIVING
from lorikeet.router.api.answer_parts import json_response
from lorikeet.router.api.routes.admin import AdminRoutes
from lorikeet.router.api.service import Routes, Service
from lorikeet.router.errors import BodyTooLarge, ReloadRefused, RouteNotServed, ValidationError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_PART = re.compile(r"(adapter_model|model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|README\.md")
_ABANDONED_S = 3600.0
"""A folder that receives files is deleted after so long without a new byte."""


class AdapterFileRoutes(Routes):
    """The handlers; each is for administrators."""

    def __init__(self, service: Service, admin: AdminRoutes) -> None:
        super().__init__(service)
        self._admin = admin
        self._receiving: set[Path] = set()
        """Files whose bodies are being read."""

    def routes(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        """Handlers of POST by path."""
        path = "/admin/adapters/files/{name}"
        return {path: self.complete, f"{path}/{{file}}": self.file}

    async def file(self, request: Request) -> Response:
        """One file, which is the whole body. One that arrived earlier is replaced."""
        self._admin.check(request)
        name, file = self._name(request), request.path_params["file"]
        if file not in {*SMALL_NAMES, *WEIGHTS, *HEADS} and not _PART.fullmatch(file):
            raise ValidationError(f"{file[:80]!r} is no file of an adapter", "file")
        root = self._root()
        path = root / f"{ARRIVING}{name}" / file
        if path in self._receiving:
            raise ReloadRefused(f"another request is sending {file} of {name!r}: wait until it has ended")
        self._receiving.add(path)
        try:
            with _writing():
                await asyncio.to_thread(_delete_abandoned, root, {path.parent for path in self._receiving})
                path.parent.mkdir(parents=True, exist_ok=True)
                await self._receive(request, path)
        finally:
            self._receiving.remove(path)
        return Response(status_code=204)

    async def complete(self, request: Request) -> Response:
        """All files have arrived: the folder gets the adapter's name. 409 where there is one of that name."""
        self._admin.check(request)
        name, root = self._name(request), self._root()
        arrived, folder = root / f"{ARRIVING}{name}", root / name
        if file := next((path.name for path in self._receiving if path.parent == arrived), None):
            raise ReloadRefused(f"{file} of {name!r} is still being received: send all files before this request")
        with _writing():
            await asyncio.to_thread(_appear, arrived, folder)
        return json_response({"path": str(folder)})

    async def _receive(self, request: Request, path: Path) -> None:
        """Write the body; nothing is left of one that is too large or breaks off. Raises OSError or BodyTooLarge."""
        limit, size = self._service.config.sources.max_adapter_bytes, 0
        try:
            with path.open("wb") as opened:
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise BodyTooLarge()
                    await asyncio.to_thread(opened.write, part)
        except BaseException:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()  # unless it has other files
            raise

    def _name(self, request: Request) -> str:
        name: str = request.path_params["name"]
        if not _NAME.fullmatch(name):
            raise ValidationError("the name must have letters, digits, `.`, `_` or `-`, at most 96", "name")
        return name

    def _root(self) -> Path:
        roots = self._service.config.sources.local_roots
        if not roots:
            raise RouteNotServed("/admin/adapters/files", "start the server with --local-adapter-root FOLDER")
        return Path(os.path.realpath(roots[-1]))  # the first ones of the embedded model are in the package


@contextmanager
def _writing() -> Iterator[None]:
    """Raises ReloadRefused where the root cannot be written."""
    try:
        yield
    except OSError as error:
        raise ReloadRefused(f"the folder of adapters cannot be written: {error.strerror}") from None


def _delete_abandoned(root: Path, used: Set[Path]) -> None:
    """Delete the folders of adapters whose files stopped arriving, except for `used` ones."""
    for folder in set(root.glob(f"{ARRIVING}*/")) - used:
        with suppress(FileNotFoundError):  # another request completes it
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest > _ABANDONED_S:
                shutil.rmtree(folder)


def _appear(arrived: Path, folder: Path) -> None:
    """Rename the folder of files that have arrived. Raises ValidationError, ReloadRefused or OSError."""
    if not arrived.is_dir():
        raise ValidationError(f"no file of {folder.name!r} has arrived", "name")
    if folder.exists():
        shutil.rmtree(arrived)
        raise ReloadRefused(f"there is a folder {folder.name!r} already: choose another name")
    arrived.rename(folder)
