"""Reads the operator's files again while serving: the new ones come into force whole, or nothing changes."""

import asyncio
from dataclasses import dataclass

import structlog

from lorikeet.adapters import catalogue, keys
from lorikeet.adapters.catalogue import Catalogue, CatalogueError
from lorikeet.adapters.keys import Keys
from lorikeet.adapters.refs import Source
from lorikeet.router.adapters.preload import AdapterPreloader
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ReloadRefused

log = structlog.get_logger()

_SHOWN = 20


def read_catalogue(config: RouterConfig) -> Catalogue | None:
    """The operator's list. Raises CatalogueError."""
    if config.catalogue_path is None:
        return None
    return catalogue.read(config.catalogue_path, Source(config.default_adapter_source or config.adapter_source))


def read_keys(config: RouterConfig) -> Keys:
    """The server's own keys. Raises CatalogueError."""
    if config.keys_path is None:
        return Keys(admin_sha256=config.admin_key_sha256)
    return keys.read(config.keys_path, config.admin_key_sha256)


@dataclass(frozen=True)
class Changed:
    """What a reload did."""

    num_entries: int
    num_changed: int


class Reloading:
    """One at a time."""

    def __init__(self, config: RouterConfig, selection: Selection, preloader: AdapterPreloader | None) -> None:
        self._config = config
        self._selection = selection
        self._preloader = preloader
        self._turn = asyncio.Lock()

    async def reload(self) -> Changed:
        """Raises ReloadRefused, which names what is wrong; then all is as before."""
        async with self._turn:
            try:
                new = await asyncio.to_thread(read_catalogue, self._config)
                new_keys = await asyncio.to_thread(read_keys, self._config)
            except CatalogueError as error:
                raise ReloadRefused(str(error)) from None
            directory = self._selection.directory
            changed = [] if new is None else list(directory.news(new))
            if new is not None:
                problems = dict(directory.unread_news(new))
                if self._preloader is not None:
                    problems |= await self._preloader.look(changed)
                if problems:
                    shown = "; ".join(f"{alias}: {problem}" for alias, problem in list(problems.items())[:_SHOWN])
                    raise ReloadRefused(f"{len(problems)} of its adapters cannot be served: {shown}")
                directory.replace(new)
            self._selection.keys = new_keys
            num_entries = 0 if new is None else len(new.entries)
            log.info("catalogue_reloaded", num_entries=num_entries, num_changed=len(changed))
            return Changed(num_entries, len(changed))
