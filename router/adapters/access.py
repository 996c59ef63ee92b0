"""Which callers may use which adapters: rights belong to the adapter itself, whatever name or path reaches it."""

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable

from lorikeet.adapters.catalogue import CatalogueEntry
from lorikeet.adapters.keys import Key
from lorikeet.adapters.refs import Ref, Source
from lorikeet.adapters.sources.base import Resolved
from lorikeet.adapters.sources.registry import Sources
from lorikeet.router.adapters.directory import Directory, Listed

_RealId = tuple[Source, str]
_SLASH = re.compile("/")


class Access:
    """Access rights of one router. Without `sources` only the base model is served."""

    def __init__(
        self,
        directory: Directory,
        sources: Sources | None,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Links in local folders are followed anew after `ttl_s`."""
        self._directory, self._sources = directory, sources
        self._ttl_s, self._clock = ttl_s, clock
        self._closed: dict[_RealId, list[CatalogueEntry]] = {}
        """The entries with `keys`, by what they name."""
        self._made_at = -math.inf
        self._resolved: dict[Ref, str] = {}
        """What the operator's names turned out to be at their sources."""
        directory.on_change.append(self._forget)

    def may_use(self, entry: CatalogueEntry, key: Key | None) -> bool:
        """Whether the holder of `key` may use or list an alias."""
        if key is not None and key.admin:
            return True
        if entry.keys is not None and (key is None or key.name not in entry.keys):
            return False
        return key is None or key.adapters is None or entry.alias in key.adapters

    def may_list(self, line: Listed, key: Key | None, *, has_keys: bool) -> bool:
        """As `may_use`. An entry that could not be parsed may have had `keys`, so these are for administrators."""
        if line.entry is not None:
            return self.may_use(line.entry, key)
        return not has_keys or (key is not None and key.admin)

    async def may_open(self, ref: Ref, key: Key | None, resolved: Resolved | None = None) -> bool:
        """Whether the holder of `key` may use what `ref` names, whether or not it exists."""
        if key is not None and key.admin:
            return True
        if key is not None and key.adapters is not None and not {str(ref), ref.id} & key.adapters:
            return False
        if not (closed := await self._index()):
            return True
        assert self._sources is not None
        ids = await asyncio.to_thread(self._sources[ref.source].real_ids, ref.id)
        if resolved is not None and resolved.real_id:
            ids |= {resolved.real_id}
        if ref.source is not Source.HUB:  # what lies below a closed folder is closed, too
            ids |= {id[: slash.start()] for id in ids for slash in _SLASH.finditer(id)}
        entries = [entry for id in ids for entry in closed.get((ref.source, id), ())]
        return not entries or any(self.may_use(entry, key) for entry in entries)

    def note(self, ref: Ref, resolved: Resolved) -> None:
        """Record what a name of the operator's is at its source."""
        if resolved.real_id and self._resolved.get(ref) != resolved.real_id:
            self._resolved[ref] = resolved.real_id
            self._forget()

    async def _index(self) -> dict[_RealId, list[CatalogueEntry]]:
        if self._clock() - self._made_at >= self._ttl_s:
            began_at = self._clock()
            entries = [entry for entry in self._directory.entries() if entry.keys is not None]
            self._made_at = began_at  # a change during the next line asks for another index
            self._closed = await asyncio.to_thread(self._indexed, entries)
        return self._closed

    def _indexed(self, entries: list[CatalogueEntry]) -> dict[_RealId, list[CatalogueEntry]]:
        found: defaultdict[_RealId, list[CatalogueEntry]] = defaultdict(list)
        for entry in entries:
            for ref in {version.ref for version in entry.versions}:
                assert self._sources is not None
                ids = self._sources[ref.source].real_ids(ref.id)
                for id in ids | ({self._resolved[ref]} if ref in self._resolved else set()):
                    found[ref.source, id].append(entry)
        return dict(found)

    def _forget(self) -> None:
        self._made_at = -math.inf
