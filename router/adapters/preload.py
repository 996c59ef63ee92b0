"""The operator's adapters and files: preloads the adapters, and reloads the files while serving.

Every entry is validated once, and those that are to stay loaded are loaded and pinned. An adapter whose source does not
answer is tried again. Reloaded files are used completely, or nothing changes.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from lorikeet.adapters import catalogue, keys
from lorikeet.adapters.catalogue import Catalogue, CatalogueEntry, CatalogueError
from lorikeet.adapters.errors import AdapterError, LoaderFailed, SourceUnreachable
from lorikeet.adapters.keys import Key, Keys
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.router.adapters.loading import AdapterAdmission
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ReloadRefused
from lorikeet.router.requests.request import Heads

log = structlog.get_logger()

RETRY_S = 10.0
"""Until a source that did not answer is tried again."""
RECHECK_S = 60.0
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
            seconds = RETRY_S if not is_complete else RECHECK_S if problems else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    async def validate(self, entries: Iterable[CatalogueEntry]) -> dict[str, str]:
        """The problems by alias, found without loading anything. A source without an answer is not a problem."""
        validated = list(entries)
        problems = await asyncio.gather(*(self._validate(entry) for entry in validated))
        return {entry.alias: problem for entry, problem in zip(validated, problems, strict=True) if problem}

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
        digests = {digest for contents in loaded if contents is not None for digest in contents}
        for digest, entry in list(self._pinned.items()):
            if digest not in digests and directory.find(entry.alias) != entry:
                del self._pinned[digest]
                self._admission.unpin(digest)
        return all(contents is not None for contents in loaded)

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


_SHOWN = 20


def read_catalogue(config: RouterConfig) -> Catalogue | None:
    """The operator's catalogue. Raises CatalogueError."""
    if config.catalogue_path is None:
        return None
    return catalogue.read(config.catalogue_path, SourceKind(config.default_adapter_source or config.adapter_source))


def read_keys(config: RouterConfig) -> Keys:
    """The server's own API keys. Raises CatalogueError."""
    hashes, isolates = enumerate(config.api_keys_sha256, 1), not config.share_prefixes
    flag_keys = [(digest, Key(f"api-key-{number}", isolate=isolates)) for number, digest in hashes]
    if config.keys_path is None:
        return Keys(flag_keys, admin_sha256=config.admin_key_sha256)
    return keys.read(config.keys_path, config.admin_key_sha256, flag_keys, isolate=isolates)


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
