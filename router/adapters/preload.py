"""Keeps the operator's adapters in order: looks at every entry once, loads those that are pinned, and has them stay.

Knows the directory, the loader and where shards stand; an adapter whose source gives no answer is tried again.
"""

import asyncio
from collections.abc import Iterable

import structlog

from lorikeet.adapters.catalogue import Entry
from lorikeet.adapters.errors import AdapterError, LoaderFailed, SourceUnreachable
from lorikeet.adapters.refs import Ref
from lorikeet.router.adapters.admission import Admission
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.requests.adapter_ref import Adapter, Heads

log = structlog.get_logger()

RETRY_SECONDS = 10.0
"""Until what could not be asked is asked again."""
RECHECK_SECONDS = 60.0
"""Until what was refused is looked at again."""
NUM_AT_ONCE = 16


class AdapterPreloader:
    """Of one router, for as long as `run` runs."""

    def __init__(self, selection: Selection, admission: Admission) -> None:
        self.settled = asyncio.Event()
        """Every entry was looked at once."""
        self._selection = selection
        self._admission = admission
        self._changed = asyncio.Event()
        self._checked: dict[str, Entry] = {}
        self._places = asyncio.Semaphore(NUM_AT_ONCE)
        self._pinned: dict[str, Entry] = {}
        """By digest."""
        selection.directory.on_change.append(self._changed.set)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._changed.clear()
            is_complete = await self._settle()
            if not self.settled.is_set():
                self._report()
                self.settled.set()
            try:
                # What is broken may be mended where it lies.
                seconds = RETRY_SECONDS if not is_complete else RECHECK_SECONDS if self._has_problems() else None
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def look(self, entries: Iterable[Entry]) -> dict[str, str]:
        """What is wrong with which alias, without loading anything. A source without an answer says nothing."""
        wanted = list(entries)
        found = await asyncio.gather(*(self._look(entry) for entry in wanted))
        return {entry.alias: problem for entry, problem in zip(wanted, found, strict=True) if problem}

    async def _settle(self) -> bool:
        """Bring pins in line with the directory; whether nothing is left to try again."""
        directory = self._selection.directory
        entries = list(directory.entries())
        self._checked = {alias: entry for alias, entry in self._checked.items() if directory.find(alias) == entry}
        looked = [entry for entry in entries if not self._is_kept(entry)]
        new = [entry for entry in looked if self._checked.get(entry.alias) != entry or directory.problem(entry.alias)]
        kept, problems = await asyncio.gather(
            asyncio.gather(*(self._keep(entry) for entry in entries if self._is_kept(entry))), self.look(new)
        )
        for entry in new:
            self._checked[entry.alias] = entry
            directory.note(entry, problems.get(entry.alias, ""))
        digests = {digest for entry_digests in kept if entry_digests is not None for digest in entry_digests}
        for digest in [digest for digest, entry in self._pinned.items() if digest not in digests]:
            if directory.find(self._pinned[digest].alias) != self._pinned[digest]:
                del self._pinned[digest]
                self._admission.unpin(digest)
        return all(each is not None for each in kept)

    def _is_kept(self, entry: Entry) -> bool:
        """The adapter of everybody who names none is among them, whoever lists it."""
        return entry.pin or entry.alias == self._selection.directory.default

    async def _keep(self, entry: Entry) -> list[str] | None:
        """Digests of a pinned entry, all loaded; None where it is worth trying again."""
        directory = self._selection.directory
        digests = []
        versions: dict[Ref, Heads] = {}
        try:
            for version in entry.versions:
                async with self._places:
                    adapter = await self._selection.opened(entry, version.ref)
                    content = await self._admission.content(adapter)
                versions[version.ref] = Heads(adapter, content)
                digests.append(content.digest)
                self._pin(digests[-1], adapter, entry)
        except (SourceUnreachable, LoaderFailed) as error:
            log.warning("adapter_not_kept_yet", adapter=entry.alias[:256], reason=str(error)[:512])
            return None
        except AdapterError as error:
            directory.note(entry, str(error))
            return digests
        directory.note(entry, "")
        directory.note_contents(entry, versions)
        return digests

    def _pin(self, digest: str, adapter: Adapter, entry: Entry) -> None:
        self._pinned[digest] = entry
        self._admission.pin(digest, adapter)

    async def _look(self, entry: Entry) -> str:
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

    def _has_problems(self) -> bool:
        directory = self._selection.directory
        return any(directory.problem(entry.alias) for entry in directory.entries())

    def _report(self) -> None:
        problems = [line for line in self._selection.directory.listed() if line.problem]
        for line in problems:
            log.error("adapter_not_served", adapter=line.alias[:256], reason=line.problem[:512])
