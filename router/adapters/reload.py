"""Reloads the operator's files while serving: the new ones are used completely, or nothing changes."""

import asyncio
from dataclasses import dataclass

import structlog

from lorikeet.adapters import catalogue, keys
from lorikeet.adapters.catalogue import Catalogue, CatalogueError
from lorikeet.adapters.keys import Key, Keys
from lorikeet.adapters.refs import Source
from lorikeet.router.adapters.preload import AdapterPreloader
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ReloadRefused

log = structlog.get_logger()

_SHOWN = 20


def read_catalogue(config: RouterConfig) -> Catalogue | None:
    """The operator's catalogue. Raises CatalogueError."""
    if config.catalogue_path is None:
        return None
    return catalogue.read(config.catalogue_path, Source(config.default_adapter_source or config.adapter_source))


def read_keys(config: RouterConfig) -> Keys:
    """The server's own API keys. Raises CatalogueError."""
    hashes, isolates = enumerate(config.api_keys_sha256, 1), not config.share_prefixes
    given = [(digest, Key(f"api-key-{number}", isolate=isolates)) for number, digest in hashes]
    if config.keys_path is None:
        return Keys(given, admin_sha256=config.admin_key_sha256)
    return keys.read(config.keys_path, config.admin_key_sha256, given, isolate=isolates)


@dataclass(frozen=True)
class ReloadResult:
    """The result of a reload."""

    num_entries: int
    num_changed: int


class Reloading:
    """Runs one reload at a time."""

    def __init__(self, config: RouterConfig, selection: Selection, preloader: AdapterPreloader | None) -> None:
        self._config = config
        self._selection = selection
        self._preloader = preloader
        self._lock = asyncio.Lock()

    async def reload(self) -> ReloadResult:
        """Raises ReloadRefused, which names the problems; then nothing has changed."""
        async with self._lock:
            try:
                new = await asyncio.to_thread(read_catalogue, self._config)
                new_keys = await asyncio.to_thread(read_keys, self._config)
            except CatalogueError as error:
                raise ReloadRefused(str(error)) from None
            directory = self._selection.directory
            changed = [] if new is None else directory.changed_entries(new)
            if new is not None:
                problems = directory.new_problems(new)
                if self._preloader is not None:
                    problems |= await self._preloader.validate(changed)
                if problems:
                    shown = "; ".join(f"{alias}: {problem}" for alias, problem in list(problems.items())[:_SHOWN])
                    raise ReloadRefused(f"{len(problems)} of its adapters cannot be served: {shown}")
                directory.replace(new)
            self._selection.keys = new_keys.after(self._selection.keys)
            num_entries = 0 if new is None else len(new.entries)
            log.info("catalogue_reloaded", num_entries=num_entries, num_changed=len(changed))
            return ReloadResult(num_entries, len(changed))
