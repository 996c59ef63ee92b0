"""The adapters that the operator has listed: by flags, in the catalogue's file, or through an admin route.

Holds aliases and their problems. A reload takes the whole new file or changes nothing.
"""

import difflib
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from lorikeet.adapters import refs
from lorikeet.adapters.catalogue import Catalogue, CatalogueEntry, Version
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.router.config import RouterConfig
from lorikeet.router.requests.request import Heads

MAX_ADDED = 16_384
"""Maximum aliases that administrators add while the server runs: every caller of the catalogue gets all of them."""
_MAX_COMPARED, _MAX_COMPARED_CHARS = 200, 100
"""Maximum names, and maximum characters of a name, in the search for the nearest names."""


@dataclass(frozen=True)
class Listed:
    """One line of the directory."""

    alias: str
    entry: CatalogueEntry | None
    """None for an alias whose entry in the file could not be parsed."""
    problem: str
    """Why it is not served; "" for one that is."""
    created: int
    """When it was loaded, else listed, in seconds since 1970."""


@dataclass(frozen=True)
class DefaultHeads:
    """The default adapter, where it has only heads, as it was when it was loaded."""

    entry: CatalogueEntry
    versions: Mapping[Ref, Heads]

    def choose(self, who: str) -> Heads:
        """The version for `who`. It is not resolved again: no text depends on heads, so no request waits for them."""
        return self.versions[self.entry.choose(who).ref]

    @property
    def num_heads(self) -> int:
        """The smallest number of heads of any version."""
        return min(heads.content.num_heads for heads in self.versions.values() if heads.content is not None)


class Directory:
    """Directory of one router. The administrator's entries precede the file's, and those precede the flags'."""

    def __init__(self, config: RouterConfig, catalogue: Catalogue | None = None) -> None:
        self.default = config.adapter_id
        self._flags: dict[str, CatalogueEntry] = {}
        if config.adapter_id is not None:
            self._add_flag(config.adapter_id, SourceKind(config.adapter_source))
        preloaded = SourceKind(config.preloaded_adapter_source or config.adapter_source)
        for name in config.preloaded_adapter_ids:
            self._add_flag(name, preloaded)
        for alias, (source, id) in config.lora_modules.items():
            self._flags[alias] = single(alias, refs.parse(id, SourceKind(source)))
        self._added: dict[str, CatalogueEntry] = {}
        self._file: dict[str, CatalogueEntry] = {}
        self._entries = ChainMap(self._added, self._file, self._flags)
        self._unread: dict[str, str] = {}
        self.unparsed: tuple[CatalogueEntry, ...] = ()
        """What the file's other entries close, as in Catalogue."""
        self._wrong: dict[str, tuple[CatalogueEntry, str]] = {}
        """Problems that the validation of an entry's adapter has found."""
        self._heads: DefaultHeads | None = None
        self._created = int(time.time())
        self._loaded_at: dict[str, tuple[CatalogueEntry, int]] = {}
        """When an entry's contents were loaded, or the entry was added."""
        self.on_change: list[Callable[[], None]] = []
        if catalogue is not None:
            self.replace(catalogue)

    def find(self, alias: str) -> CatalogueEntry | None:
        return self._entries.get(alias)

    def problem(self, alias: str) -> str:
        """Why an alias is not served; "" for one that is, or that is not listed."""
        entry = self.find(alias)
        if entry is None:
            return self._unread.get(alias, "")
        wrong = self._wrong.get(alias)
        return wrong[1] if wrong is not None and wrong[0] == entry else ""

    def nearest(self, name: str, may_see: Callable[[CatalogueEntry], bool], others: Iterable[str] = ()) -> list[str]:
        """Aliases that are served, and names of `others`, that are spelled like `name`, the nearest first."""
        first = name[:1].casefold()
        alike = (
            alias
            for alias, entry in self._entries.items()
            if (alias[:1].casefold() == first or name in alias) and may_see(entry) and not self.problem(alias)
        )
        known = {*alike, *(other for other in others if other[:1].casefold() == first or name in other)}
        likely = sorted(known, key=lambda alias: abs(len(alias) - len(name)))[:_MAX_COMPARED]
        return difflib.get_close_matches(name[:_MAX_COMPARED_CHARS], likely, n=3, cutoff=0.5)

    def entries(self) -> Iterator[CatalogueEntry]:
        """Every alias once."""
        yield from self._entries.values()

    def listed(self) -> Iterator[Listed]:
        """All entries, with those that are not served."""
        for entry in self.entries():
            loaded = self._loaded_at.get(entry.alias)
            created = loaded[1] if loaded is not None and loaded[0] == entry else self._created
            yield Listed(entry.alias, entry, self.problem(entry.alias), created)
        for alias, problem in self._unread.items():
            if self.find(alias) is None:
                yield Listed(alias, None, problem, self._created)

    def set_problem(self, entry: CatalogueEntry, problem: str) -> None:
        """The result of validating an entry's adapter; "" for none."""
        if self.find(entry.alias) != entry:
            return
        if problem:
            self._wrong[entry.alias] = (entry, problem)
        else:
            self._wrong.pop(entry.alias, None)

    def set_loaded(self, entry: CatalogueEntry, versions: Mapping[Ref, Heads]) -> None:
        """The contents of an entry's versions, which are loaded and pinned."""
        if self.find(entry.alias) == entry:
            self._loaded_at.setdefault(entry.alias, (entry, int(time.time())))
        if entry.alias == self.default:
            contents = [heads.content for heads in versions.values()]
            is_heads_only = all(content is not None and content.is_heads_only for content in contents)
            self._heads = DefaultHeads(entry, versions) if is_heads_only else None

    @property
    def default_heads(self) -> DefaultHeads | None:
        """The heads of every request that has none."""
        heads = self._heads
        return heads if heads is not None and self.find(heads.entry.alias) == heads.entry else None

    def changed_entries(self, catalogue: Catalogue) -> list[CatalogueEntry]:
        """Entries of a new file that are not in the current one, or differ there."""
        return [entry for alias, entry in catalogue.entries.items() if self._file.get(alias) != entry]

    def new_problems(self, catalogue: Catalogue) -> dict[str, str]:
        """Aliases of a new file that cannot be parsed, unless they are the same in the current one."""
        return {alias: problem for alias, problem in catalogue.problems.items() if self._unread.get(alias) != problem}

    def replace(self, catalogue: Catalogue) -> None:
        """Take a new file."""
        self._loaded_at |= {entry.alias: (entry, int(time.time())) for entry in self.changed_entries(catalogue)}
        self._file.clear()
        self._file.update(catalogue.entries)
        self._unread, self.unparsed = dict(catalogue.problems), catalogue.unparsed
        self._wrong = {alias: wrong for alias, wrong in self._wrong.items() if self.find(alias) == wrong[0]}
        self._changed()

    @property
    def is_full(self) -> bool:
        """Whether no entry may be added."""
        return len(self._added) >= MAX_ADDED

    def add(self, entry: CatalogueEntry) -> None:
        """Add a loaded entry until the server ends or the entry is removed."""
        self._loaded_at[entry.alias] = (entry, int(time.time()))
        self._added[entry.alias] = entry
        self._changed()

    def remove(self, alias: str) -> bool:
        """Remove an entry; whether it was listed. An entry of the file is listed again after a restart."""
        was_listed = alias in self._entries
        for entries in self._entries.maps:
            entries.pop(alias, None)
        self._wrong.pop(alias, None)
        self._loaded_at.pop(alias, None)
        self._changed()
        return was_listed

    def _add_flag(self, name: str, source: SourceKind) -> None:
        ref = refs.parse(name, source)
        self._flags[name] = CatalogueEntry(name, (Version(ref, 1.0),), pin=True)

    def _changed(self) -> None:
        for callback in self.on_change:
            callback()


def single(alias: str, ref: Ref) -> CatalogueEntry:
    """An alias of one adapter, with default settings."""
    return CatalogueEntry(alias, (Version(ref, 1.0),))
