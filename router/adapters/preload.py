"""Preloads the operator's adapters: validates every entry once, and loads and pins those that are to stay loaded.

An adapter whose source does not answer is tried again.
"""

import asyncio
import contextlib
from collections.abc import Iterable

import structlog

from lorikeet.adapters.catalogue import CatalogueEntry
from lorikeet.adapters.errors import AdapterError, LoaderFailed, SourceUnreachable
from lorikeet.adapters.refs import Ref
from lorikeet.router.adapters.admission import AdapterAdmission
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.requests.request import Heads

log = structlog.get_logger()

RETRY_SECONDS = 10.0
"""Until a source that did not answer is tried again."""
RECHECK_SECONDS = 60.0
"""Until an adapter with a problem is validated again."""
NUM_AT_ONCE = 16


class AdapterPreloader:
    """Preloader of one router; works while `run` runs."""

    def __init__(self, selection: Selection, admission: AdapterAdmission) -> None:
        self.settled = asyncio.Event()
        """Set once every entry was validated."""
        self._selection = selection
        self._directory = selection.directory
        self._admission = admission
        self._changed = asyncio.Event()
        self._checked: dict[str, CatalogueEntry] = {}
        self._places = asyncio.Semaphore(NUM_AT_ONCE)
        self._pinned: dict[str, CatalogueEntry] = {}
        """By digest."""
        self._directory.on_change.append(self._changed.set)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._changed.clear()
            is_complete = await self._reconcile()
            problems = [line for line in self._directory.listed() if line.entry is not None and line.problem]
            if not self.settled.is_set():
                for line in self._directory.listed():
                    if line.problem:
                        log.error("adapter_not_served", adapter=line.alias[:256], reason=line.problem[:512])
                self.settled.set()
            # An adapter with a problem may be repaired at its source.
            seconds = RETRY_SECONDS if not is_complete else RECHECK_SECONDS if problems else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    async def validate(self, entries: Iterable[CatalogueEntry]) -> dict[str, str]:
        """The problems by alias, found without loading anything. A source without an answer is not a problem."""
        wanted = list(entries)
        found = await asyncio.gather(*(self._validate(entry) for entry in wanted))
        return {entry.alias: problem for entry, problem in zip(wanted, found, strict=True) if problem}

    async def _reconcile(self) -> bool:
        """Make the pins match the directory; whether nothing has to be tried again."""
        directory = self._directory
        entries = list(directory.entries())
        self._checked = {alias: entry for alias, entry in self._checked.items() if directory.find(alias) == entry}
        others = [entry for entry in entries if not self._is_pinned(entry)]
        new = [entry for entry in others if self._checked.get(entry.alias) != entry or directory.problem(entry.alias)]
        loaded, problems = await asyncio.gather(
            asyncio.gather(*(self._load(entry) for entry in entries if self._is_pinned(entry))), self.validate(new)
        )
        for entry in new:
            self._checked[entry.alias] = entry
            directory.set_problem(entry, problems.get(entry.alias, ""))
        digests = {digest for each in loaded if each is not None for digest in each}
        for digest, entry in list(self._pinned.items()):
            if digest not in digests and directory.find(entry.alias) != entry:
                del self._pinned[digest]
                self._admission.unpin(digest)
        return all(each is not None for each in loaded)

    def _is_pinned(self, entry: CatalogueEntry) -> bool:
        """The default adapter stays loaded, whatever its entry says."""
        return entry.pin or entry.alias == self._directory.default

    async def _load(self, entry: CatalogueEntry) -> list[str] | None:
        """Load and pin all versions of an entry; return their digests, None where it should be tried again."""
        digests = []
        versions: dict[Ref, Heads] = {}
        try:
            for version in entry.versions:
                async with self._places:
                    adapter = await self._selection.opened(entry, version.ref)
                    content = await self._admission.content(adapter)
                versions[version.ref] = Heads(adapter, content)
                digests.append(content.digest)
                self._pinned[content.digest] = entry
                self._admission.pin(content.digest, adapter)
        except (SourceUnreachable, LoaderFailed) as error:
            log.warning("adapter_not_pinned_yet", adapter=entry.alias[:256], reason=str(error)[:512])
            return None
        except AdapterError as error:
            self._directory.set_problem(entry, str(error))
            return digests
        self._directory.set_problem(entry, "")
        self._directory.set_loaded(entry, versions)
        return digests

    async def _validate(self, entry: CatalogueEntry) -> str:
        try:
            for version in entry.versions:
                async with self._places:
                    adapter = await self._selection.opened(entry, version.ref)
                    await self._admission.check(adapter)
        except (SourceUnreachable, LoaderFailed):
            return ""
        except AdapterError as error:
            return str(error)
        return ""
