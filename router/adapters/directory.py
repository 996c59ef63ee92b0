"""The adapters that the operator named: by flags, in the catalogue's file, or through an admin route while serving.

Knows aliases and what was found wrong with them; a reload takes the whole new file or leaves everything as it is.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lorikeet.adapters import refs
from lorikeet.adapters.catalogue import Catalogue, Entry, Version
from lorikeet.adapters.refs import Ref, Source
from lorikeet.router.config import RouterConfig
from lorikeet.router.requests.adapter_ref import Heads


@dataclass(frozen=True)
class Listed:
    """One line of the directory."""

    alias: str
    entry: Entry | None
    """None for an alias whose words in the file could not be read."""
    problem: str
    """Why it is not served; empty for one that is."""
    created: int


@dataclass(frozen=True)
class DefaultHeads:
    """The default adapter, where it holds heads alone, as it was when it was loaded."""

    entry: Entry
    versions: Mapping[Ref, Heads]

    def choose(self, who: str) -> Heads:
        """The version for `who`. Nobody is asked for it: no text depends on heads, so no request waits for them."""
        return self.versions[self.entry.choose(who).ref]

    @property
    def num_heads(self) -> int:
        """That each version brings at least."""
        return min(heads.content.num_heads for heads in self.versions.values() if heads.content is not None)


class Directory:
    """Of one router. The administrator's entries go before the file's, and those before the flags'."""

    def __init__(self, config: RouterConfig, catalogue: Catalogue | None = None) -> None:
        self.default = config.adapter_id
        self._flags: dict[str, Entry] = {}
        if config.adapter_id is not None:
            self._add_flag(config.adapter_id, Source(config.adapter_source))
        preloaded = Source(config.preloaded_adapter_source or config.adapter_source)
        for name in config.preloaded_adapter_ids:
            self._add_flag(name, preloaded)
        self._added: dict[str, Entry] = {}
        self._file: dict[str, Entry] = {}
        self._unread: dict[str, str] = {}
        self._wrong: dict[str, tuple[Entry, str]] = {}
        """What was found when an entry's adapter was looked at."""
        self._heads: DefaultHeads | None = None
        self._created = int(time.time())
        self.on_change: list[Callable[[], None]] = []
        if catalogue is not None:
            self.replace(catalogue)

    def find(self, alias: str) -> Entry | None:
        for entries in (self._added, self._file, self._flags):
            entry = entries.get(alias)
            if entry is not None:
                return entry
        return None

    def problem(self, alias: str) -> str:
        """Why an alias is not served; empty for one that is, or is none."""
        entry = self.find(alias)
        if entry is None:
            return self._unread.get(alias, "")
        found = self._wrong.get(alias)
        return found[1] if found is not None and found[0] == entry else ""

    def entries(self) -> Iterator[Entry]:
        """Every alias once."""
        for alias in {**self._flags, **self._file, **self._added}:
            entry = self.find(alias)
            assert entry is not None
            yield entry

    def listed(self) -> Iterator[Listed]:
        """Everything, broken entries too."""
        for entry in self.entries():
            yield Listed(entry.alias, entry, self.problem(entry.alias), self._created)
        for alias, problem in self._unread.items():
            if self.find(alias) is None:
                yield Listed(alias, None, problem, self._created)

    def note(self, entry: Entry, problem: str) -> None:
        """What came out when the adapter of an entry was looked at; empty takes it back."""
        if self.find(entry.alias) != entry:
            return
        if problem:
            self._wrong[entry.alias] = (entry, problem)
        else:
            self._wrong.pop(entry.alias, None)

    def note_contents(self, entry: Entry, versions: Mapping[Ref, Heads]) -> None:
        """What the versions of an entry hold that is loaded and stays."""
        if entry.alias == self.default:
            is_heads_only = all(
                heads.content is not None and heads.content.is_heads_only for heads in versions.values()
            )
            self._heads = DefaultHeads(entry, versions) if is_heads_only else None

    @property
    def default_heads(self) -> DefaultHeads | None:
        """What guesses for every request that brings no heads."""
        heads = self._heads
        return heads if heads is not None and self.find(heads.entry.alias) == heads.entry else None

    def news(self, catalogue: Catalogue) -> Iterator[Entry]:
        """Entries of a new file that were not in the old one as they are."""
        for alias, entry in catalogue.entries.items():
            if self._file.get(alias) != entry:
                yield entry

    def unread_news(self, catalogue: Catalogue) -> Mapping[str, str]:
        """What can't be read in a new file and could be, or was not there, in the old one."""
        return {alias: problem for alias, problem in catalogue.problems.items() if self._unread.get(alias) != problem}

    def replace(self, catalogue: Catalogue) -> None:
        """Take a new file as it is."""
        self._file = dict(catalogue.entries)
        self._unread = dict(catalogue.problems)
        self._wrong = {alias: found for alias, found in self._wrong.items() if self.find(alias) == found[0]}
        self._changed()

    def add(self, entry: Entry) -> None:
        """Until the server ends, or the entry is removed."""
        self._added[entry.alias] = entry
        self._changed()

    def remove(self, alias: str) -> bool:
        """Whether it was there. An entry of the file comes back with the next start."""
        there = [entries.pop(alias, None) for entries in (self._added, self._file, self._flags)]
        self._wrong.pop(alias, None)
        self._changed()
        return any(entry is not None for entry in there)

    def _add_flag(self, name: str, source: Source) -> None:
        ref = refs.parse(name, source)
        self._flags[name] = Entry(name, (Version(ref, 1.0),), pin=True)

    def _changed(self) -> None:
        for tell in self.on_change:
            tell()


def single(alias: str, ref: Ref) -> Entry:
    """An alias of one adapter, without further words."""
    return Entry(alias, (Version(ref, 1.0),))
