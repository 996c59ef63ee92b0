"""Resolves the adapter that a request names, its version, and the caller's right to use it; loads no content.

`Directory` has the adapters that the operator has listed: by flags, in the catalogue's file, or through an admin route.
A reload takes the whole new file or changes nothing.
"""

import asyncio
import difflib
import math
import re
import time
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lorikeet.adapters import refs
from lorikeet.adapters.catalogue import SOURCES, Catalogue, CatalogueEntry, Version
from lorikeet.adapters.errors import AdapterError, AdapterNotAllowed, AdapterNotFound, NotServed
from lorikeet.adapters.keys import Key, Keys
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.adapters.sources.base import Resolved
from lorikeet.adapters.sources.listed import is_below
from lorikeet.adapters.sources.registry import LOOKUP_S, Rights, Sources
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ModelNotFound, UnsupportedField, ValidationError, adapter_problem
from lorikeet.router.requests.request import Adapter, Caller, Heads
from lorikeet.router.schemas.adapters import BASE_NAMES, AdapterFields, MergeFields, checked_token

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


_RealId = tuple[SourceKind, str]
_SLASH = re.compile("/")


class AdapterAccess:
    """Access rights of one router. Without `sources` only the base model is served."""

    def __init__(self, directory: Directory, sources: Sources | None, config: RouterConfig) -> None:
        """Links in local folders are followed anew after the configuration's `auth_cache_ttl_s`."""
        self._directory, self._sources = directory, sources
        self._ttl_s = config.auth_cache_ttl_s
        self._has_keys = config.has_keys
        self._shares_hub_token = config.use_hub_token_for_all
        """Whether the server reads adapters of the hub, too, with its own rights for every caller."""
        self._closed: dict[_RealId, list[CatalogueEntry]] = {}
        """The entries with `keys`, and those that could not be parsed, by what they name."""
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

    def may_list(self, line: Listed, key: Key | None) -> bool:
        """Whether the holder of `key` may list an alias. Entries that could not be parsed are for administrators, since
        they may have had `keys`.
        """
        if line.entry is not None:
            return self.may_use(line.entry, key)
        return not self._has_keys or (key is not None and key.admin)

    async def may_open(self, ref: Ref, key: Key | None, resolved: Resolved | None = None) -> bool:
        """Whether the holder of `key` may use what `ref` names, whether or not it exists. An entry that could not be
        parsed closes what it names to all but administrators. Where that is unknown, it closes all that the server
        reads with its own rights.
        """
        if key is not None and key.admin:
            return True
        if key is not None and key.adapters is not None and not {str(ref), ref.id} & key.adapters:
            return False
        is_servers = ref.source is not SourceKind.HUB or self._shares_hub_token
        if is_servers and any(not entry.versions for entry in self._unparsed):
            return False
        if not (closed := await self._index()):
            return True
        assert self._sources is not None
        ids = await asyncio.to_thread(self._sources[ref.source].real_ids, ref.id)
        if resolved is not None and resolved.real_id:
            ids |= {resolved.real_id}
        if ref.source is not SourceKind.HUB:  # what lies below a closed folder is closed, too
            ids |= {id[: slash.start()] for id in ids for slash in _SLASH.finditer(id)}
        entries = [entry for id in ids for entry in closed.get((ref.source, id), ())]
        return not entries or any(self.may_use(entry, key) for entry in entries)

    def note(self, ref: Ref, resolved: Resolved) -> None:
        """Record what a name of the operator's is at its source."""
        if resolved.real_id and self._resolved.get(ref) != resolved.real_id:
            self._resolved[ref] = resolved.real_id
            self._forget()

    async def _index(self) -> dict[_RealId, list[CatalogueEntry]]:
        if time.monotonic() - self._made_at >= self._ttl_s:
            began_at = time.monotonic()
            entries = [entry for entry in self._directory.entries() if entry.keys is not None]
            entries += self._unparsed
            self._made_at = began_at  # a change during the next line asks for another index
            self._closed = await asyncio.to_thread(self._indexed, entries)
        return self._closed

    def _indexed(self, entries: list[CatalogueEntry]) -> dict[_RealId, list[CatalogueEntry]]:
        index: defaultdict[_RealId, list[CatalogueEntry]] = defaultdict(list)
        for entry in entries:
            for ref in {version.ref for version in entry.versions}:
                assert self._sources is not None
                ids = self._sources[ref.source].real_ids(ref.id)
                for id in ids | ({self._resolved[ref]} if ref in self._resolved else set()):
                    index[ref.source, id].append(entry)
        return dict(index)

    @property
    def _unparsed(self) -> tuple[CatalogueEntry, ...]:
        return self._directory.unparsed if self._has_keys else ()

    def _forget(self) -> None:
        self._made_at = -math.inf


_BASE_ONLY = "is not supported by this server, which serves its base model alone"


class Selection:
    """Selection of adapters in one router. Without `rights` only the base model is served."""

    def __init__(self, config: RouterConfig, rights: Rights | None, directory: Directory, keys: Keys) -> None:
        self._config = config
        self.rights = rights
        self.directory = directory
        self.keys = keys
        self._local_names: dict[str, str] = {}
        self._local_at = -math.inf
        self.access = AdapterAccess(directory, None if rights is None else rights.sources, config)

    async def choose(self, fields: AdapterFields, caller: Caller) -> Adapter | None:
        """None for the base model. Raises ModelNotFound, ValidationError or a leaf of AdapterProblem."""
        fields = replace(fields, name=self.without_base(fields.name))
        if fields.merge is None and self.is_base(fields.name):
            return None
        if self.rights is None:
            raise self._base_only(fields)
        try:
            if fields.merge is not None:
                return await self._merged(fields, fields.merge, caller)
            entry = self.usable(fields.name, fields.source, caller)
            if entry is not None:
                return await self.named(entry, fields.user or caller.request_id)
            return await self._dynamic(fields, caller)
        except AdapterError as error:
            if isinstance(error, AdapterNotFound) and fields.is_model:
                raise ModelNotFound((fields.name or "")[:256], str(error)) from None
            problem = adapter_problem(error)
            if not fields.is_model:
                problem.param = fields.field
            raise problem from None

    async def choose_heads(self, fields: AdapterFields, caller: Caller) -> Heads | None:
        """The heads used in addition to the adapter: the request's, else the operator's. Raises as `choose`."""
        if fields.name:
            adapter = await self.choose(fields, caller)
            return None if adapter is None else Heads(adapter)
        heads = self.directory.default_heads
        if heads is None or not self.access.may_use(heads.entry, caller.key):
            return None
        return heads.choose(fields.user or caller.request_id)

    def is_base(self, name: str | None) -> bool:
        """Whether the name stands for the base model."""
        if not name:
            return self.directory.default is None or self.directory.default_heads is not None
        if name in self._config.model_names:
            return self.directory.find(name) is None
        return name in BASE_NAMES

    def without_base(self, name: str | None) -> str | None:
        """SGLang's `base:adapter` without the base; any other name as it is."""
        if name is None or ":" not in name or self.directory.find(name) is not None:
            return name
        names = (name.removeprefix(f"{base}:") for base in self._config.model_names if name.startswith(f"{base}:"))
        return next(filter(None, names), name)

    def entry(self, name: str | None, source: str | None = None) -> CatalogueEntry | None:
        """The operator's entry of that name, if any. A source that is given must be the entry's own."""
        entry = self.directory.find(name or self.directory.default or "")
        if entry is None or source is None or all(version.ref.source == source for version in entry.versions):
            return entry
        return None

    def usable(self, name: str | None, source: str | None, caller: Caller) -> CatalogueEntry | None:
        """The operator's entry of that name, if the caller may use it."""
        entry = self.entry(name, source)
        return entry if entry is not None and self.access.may_use(entry, caller.key) else None

    async def named(self, entry: CatalogueEntry, who: str) -> Adapter:
        """The adapter of an alias, accessed with the operator's token. Raises AdapterError."""
        return await self.opened(entry, entry.choose(who).ref)

    async def opened(self, entry: CatalogueEntry, ref: Ref) -> Adapter:
        """One version of an alias, for any caller. Raises AdapterError."""
        token, alias, template = self.operators_token(ref), entry.alias, entry.chat_template
        share = next((version.share for version in entry.versions if version.ref == ref), 1.0)
        assert self.rights is not None
        resolved = await self.rights.resolve(ref, token)
        self.access.note(ref, resolved)
        token, weight = _needed(token, resolved), entry.weight * share
        return Adapter(alias, (resolved.pin,), token=token, alias=alias, weight=weight, chat_template=template)

    def operators_token(self, ref: Ref) -> str | None:
        return self._config.hub_token if ref.source is SourceKind.HUB else None

    def listed(self, caller: Caller) -> Iterator[Listed]:
        """The lines of the directory that the caller may know of."""
        for line in self.directory.listed():
            if self.access.may_list(line, caller.key):
                yield line

    async def below_roots(self, caller: Caller) -> list[Listed]:
        """The adapters below the local roots that have no alias, as far as the caller may use them. None of them where
        the caller may not see an entry that could not be parsed.
        """
        if self.rights is None:
            return []
        known = set()
        for line in self.directory.listed():
            known.add(line.alias)
            if line.entry is not None:
                known |= {version.ref.id for version in line.entry.versions if version.ref.source is SourceKind.LOCAL}
            elif not self.access.may_list(line, caller.key):
                return []
        if time.monotonic() - self._local_at >= LOOKUP_S:
            self._local_at = time.monotonic()
            self._local_names = await asyncio.to_thread(self.rights.sources.local.names)
        lines = []
        for name, description in self._local_names.items():
            ref = Ref(SourceKind.LOCAL, name)
            if name not in known and not self.is_base(name) and await self.access.may_open(ref, caller.key):
                entry = CatalogueEntry(name, (Version(ref, 1.0),), description=description)
                lines.append(Listed(name, entry, "", 0))
        return lines

    def source(self, source: str | None) -> SourceKind:
        """The source of a request's adapter. Raises ValidationError, which names the field."""
        name = source or self._config.default_adapter_source or self._config.adapter_source
        if name == SourceKind.PBASE:
            sentence = "`adapter_source` pbase is not served: Predibase's service is closed to it"
            raise ValidationError(sentence, "adapter_source")
        if name not in SOURCES:
            raise ValidationError(f"`adapter_source` must be one of {', '.join(SOURCES)}", "adapter_source")
        return SourceKind(name)

    async def _dynamic(self, fields: AdapterFields, caller: Caller) -> Adapter:
        """An adapter that the operator has not listed: the caller's own token decides."""
        name = fields.name or self.directory.default or ""
        if fields.source is None and (line := self._unread(name, caller)) is not None:
            raise NotServed(f"{name} is not served: {line.problem}")
        ref = await self._parsed(name, fields.source, caller, fields.is_model, fields.field)
        token = self._token(fields, caller)
        resolved = await self._resolved(ref, token, caller)
        return Adapter(str(ref), (resolved.pin,), token=_needed(token, resolved), caller=caller.identity)

    def _unread(self, name: str, caller: Caller) -> Listed | None:
        """The line of a name whose entry could not be parsed."""
        if self.directory.find(name) is not None or not self.directory.problem(name):
            return None
        return next((line for line in self.listed(caller) if line.alias == name), None)

    def _token(self, fields: AdapterFields, caller: Caller) -> str | None:
        """The token for a source: never one of the server's own API keys, nor a former one."""
        is_key = fields.token is not None and self.keys.knew(fields.token)
        api_token = None if is_key else checked_token(fields.token, "`api_token`")
        bearer = checked_token(caller.token, "the token of the `Authorization` header")
        if bearer is not None and not self.is_for_source(bearer):
            bearer = None
        return api_token or bearer or (self._config.hub_token if self._config.use_hub_token_for_all else None)

    def is_for_source(self, bearer: str) -> bool:
        """Whether a token of the Authorization header, which may be meant for this server, is sent to the hub."""
        if self.keys.knew(bearer):
            return False
        if self._config.forward_bearer or bearer.startswith("hf_"):
            return True
        return self.rights is not None and not self.rights.sources.is_default_hub and not bearer.startswith("sk-")

    async def _merged(self, fields: AdapterFields, merge: MergeFields, caller: Caller) -> Adapter:
        """The caller must have access to all parts; aliases may be among them."""
        if any(not name or self.is_base(name) for name in merge.ids):
            raise ValidationError("Base model adapter cannot be merged.", fields.field)
        token = self._token(fields, caller)
        parts = await asyncio.gather(*(self._part(name, fields, caller, token) for name in merge.ids))
        pins, tokens = tuple(part.pin for part, _ in parts), tuple(own for _, own in parts)
        token = _needed(token, *(part for part, _ in parts))
        return Adapter(
            ",".join(merge.ids), pins, merge.merging, token, tokens, caller=caller.identity, request_field=fields.field
        )

    async def _part(
        self, name: str, fields: AdapterFields, caller: Caller, token: str | None
    ) -> tuple[Resolved, str | None]:
        """With the token for loading it."""
        entry = self.usable(name, fields.source, caller)
        if entry is not None:
            adapter = await self.named(entry, fields.user or caller.request_id)
            return Resolved(adapter.pins[0], is_public=adapter.token is None), adapter.token
        ref = await self._parsed(name, fields.source, caller, is_model=False, field=fields.field)
        resolved = await self._resolved(ref, token, caller)
        return resolved, _needed(token, resolved)

    async def _parsed(
        self, name: str, source_name: str | None, caller: Caller, is_model: bool, field: str = "adapter_id"
    ) -> Ref:
        """`source_name`: the request's source, if any. Without one, a folder directly below a local root precedes the
        hub. Raises AdapterNotFound for a name that can only be an alias, and for a plain name of no local adapter.
        """
        assert self.rights is not None
        is_hubs = name.startswith(refs.HUB_PREFIX) and source_name in (None, SourceKind.HUB)
        source = SourceKind.HUB if is_hubs else self.source(source_name)
        if source_name is None and source is SourceKind.HUB and not is_hubs and await self._is_local(name, caller):
            source = SourceKind.LOCAL
        if source is SourceKind.HUB and not is_hubs and refs.is_plain(name):
            others = [line.alias for line in await self.below_roots(caller)]
            nearest = self.directory.nearest(name, lambda entry: self.access.may_use(entry, caller.key), others)
            shown, hint = name[:256], _hint(nearest)
            raise AdapterNotFound(f"there is no adapter {shown!r}{hint}. The hub's own is {refs.HUB_PREFIX}{shown}")
        try:
            ref = refs.parse(name, source)
        except ValueError as error:
            if is_model:
                raise ModelNotFound(name[:256], str(error)) from None
            raise ValidationError(str(error), field) from None
        if source is SourceKind.LOCAL and refs.is_plain(name) and not await self._is_local(ref.id, caller):
            nearest = self.directory.nearest(name, lambda entry: False, await self._folders(caller))
            raise AdapterNotFound(f"{self.rights.sources.local.missing(ref, None)}{_hint(nearest)}")
        return ref

    async def _folders(self, caller: Caller) -> list[str]:
        """Names of local adapters that the caller may use, with an alias or without."""
        entries = (entry for entry in self.directory.entries() if self.access.may_use(entry, caller.key))
        named = [version.ref for entry in entries for version in entry.versions]
        unnamed = [line.alias for line in await self.below_roots(caller)]
        return [*unnamed, *(ref.id for ref in named if ref.source is SourceKind.LOCAL)]

    async def _is_local(self, name: str, caller: Caller) -> bool:
        """Whether a folder of that name lies directly below a local root, as far as the caller may know."""
        assert self.rights is not None
        is_there = await asyncio.to_thread(self.rights.sources.local.has, name)
        return is_there and await self.access.may_open(Ref(SourceKind.LOCAL, name), caller.key)

    async def _resolved(self, ref: Ref, token: str | None, caller: Caller) -> Resolved:
        """What a name that is not the operator's is for the caller. Raises AdapterError."""
        assert self.rights is not None
        self._check_download(ref, caller)
        # Before anything else, so that a closed adapter has no other answer than one that does not exist.
        if not self._is_permitted(ref) or not await self.access.may_open(ref, caller.key):
            raise self.rights.sources[ref.source].missing(ref, token)
        resolved = await self.rights.resolve(ref, token, caller.identity)
        if not await self.access.may_open(ref, caller.key, resolved):
            raise self.rights.sources[ref.source].missing(ref, token)
        return resolved

    def _check_download(self, ref: Ref, caller: Caller) -> None:
        """Raises AdapterNotAllowed for an adapter in a network that this request may not make the server load."""
        if ref.source is SourceKind.LOCAL:
            return
        if self._config.no_adapter_downloads:
            raise AdapterNotAllowed(
                f"{ref} is not loaded: this server has --no-adapter-downloads. Requests may name adapters of its local"
                " folders, and those in its list"
            )
        if caller.is_foreign_page:
            raise AdapterNotAllowed(
                f"{ref} is not loaded for pages of other sites: list the site with --cors-allow-origin, or use a key"
            )

    def _is_permitted(self, ref: Ref) -> bool:
        """Whether the server reads the adapter for callers, with its own credentials in S3."""
        prefixes = self._config.s3_prefixes
        if ref.source is not SourceKind.S3 or prefixes is None:
            return True
        assert self.rights is not None
        return all(is_below(id, prefixes) for id in self.rights.sources[ref.source].real_ids(ref.id))

    @staticmethod
    def _base_only(fields: AdapterFields) -> Exception:
        if fields.is_model:
            return ModelNotFound((fields.name or "")[:256])
        if fields.merge is not None:
            return UnsupportedField(fields.field)
        return UnsupportedField(fields.field, _BASE_ONLY)


def _needed(token: str | None, *parts: Resolved) -> str | None:
    """The token for loading: none for public adapters, whose load others share, so that no token can make it fail."""
    return None if all(part.is_public for part in parts) else token


def _hint(nearest: Sequence[str]) -> str:
    """The end of a sentence about an unknown name."""
    return f"; the nearest names are {', '.join(nearest)}" if nearest else ""
