"""All sources of one server, their settings, and the cache of their answers: which caller may use which adapter.

Imports no torch, and each source's library only at its first use.
"""

import asyncio
import hashlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from lorikeet.adapters.errors import AdapterNotAllowed, AdapterNotFound, NotServed, SourceUnreachable, from_dict
from lorikeet.adapters.refs import Pin, Ref, SourceKind
from lorikeet.adapters.sized_cache import SizedCache
from lorikeet.adapters.sources.base import AdapterSource, Resolved
from lorikeet.adapters.sources.hub import HubSource
from lorikeet.adapters.sources.listed import LocalSource, S3Source
from lorikeet.proto.config_file import ConfigFile

DEFAULT_MAX_ADAPTER_BYTES = 8 << 30


@dataclass(frozen=True)
class SourceSettings(ConfigFile):
    """Where sources look and their size limit: part of the router's and of the loader's configuration."""

    local_roots: tuple[str, ...] = ()
    local_folders: tuple[str, ...] = ()
    """Folders of single adapters outside the roots, which the operator named."""
    hidden: tuple[str, ...] = ()
    """Folders that never contain local adapters, such as the adapter store."""
    hub_cache: str | None = None
    """None is the hub library's default."""
    notes: str | None = None
    """Folder that records which hub names were public; None records them in memory only."""
    max_adapter_bytes: int = DEFAULT_MAX_ADAPTER_BYTES
    """Weights of one adapter at its source."""
    strict: bool = False
    """Whether versions of local adapters are distinguished by all bytes of their files."""


class Sources:
    """The source for each name. The router and the loader's process have one instance each."""

    def __init__(self, settings: SourceSettings) -> None:
        self.local = LocalSource(
            settings.local_roots,
            settings.max_adapter_bytes,
            settings.hidden,
            settings.local_folders,
            settings.strict,
        )
        self._sources: dict[SourceKind, AdapterSource] = {
            SourceKind.HUB: HubSource(settings.hub_cache, settings.max_adapter_bytes, settings.notes),
            SourceKind.LOCAL: self.local,
            SourceKind.S3: S3Source(settings.max_adapter_bytes, os.environ),
        }

    def __getitem__(self, source: SourceKind) -> AdapterSource:
        """Raises NotServed with the name of the source."""
        if source not in self._sources:
            raise NotServed(f"adapters of the source `{source.value}` are not served by this server")
        return self._sources[source]

    @property
    def is_default_hub(self) -> bool:
        """Whether adapters of the source `hub` come from huggingface.co."""
        from huggingface_hub import constants

        return constants.ENDPOINT.rstrip("/") == "https://huggingface.co"

    async def close(self) -> None:
        for source in self._sources.values():
            await source.close()


MAX_RESOLVED_BYTES = 32 << 20
MAX_REFUSED_BYTES = 8 << 20
"""Refusals have a cache of their own: names that do not exist must not displace those that do."""


LOOKUP_S = 5.0
"""A source that is not a folder of this machine is asked once in this time about a version that cannot be served."""
MAX_REJECTED_BYTES = 4 << 20

RejectedVersions = SizedCache[Pin, float]
"""Versions that cannot be served, and when that was found."""


def rejected_versions() -> RejectedVersions:
    """An empty cache of them."""
    return SizedCache(MAX_REJECTED_BYTES, lambda pin, _: len(pin.id) + len(pin.revision))


@dataclass(frozen=True, slots=True)
class _CachedAnswer:
    """One positive answer of a source and its time."""

    at: float
    resolved: Resolved


_Key = tuple[Ref, bytes | None]
LOCAL_S = 1.0
"""How long an answer about a local folder is cached: to look there again costs little."""
MAX_ASKED = 8
"""Questions of one caller that sources answer at a time; further ones wait. A source may take long to answer."""


class Rights:
    """The cache of answers, for one event loop.

    A positive answer is both a right and a version. Answers, positive or negative, are cached for `ttl_s` per caller
    and name, those about local folders for LOCAL_S. While a source does not answer, a public adapter's last version
    stays valid, and a private one's for `stale_s` after the caller's right was proved. A version that cannot be served
    is looked up again, since an upload may have ended meanwhile, and folders that do not exist are too. Only hashes of
    tokens are stored, and of a refusal only its words.
    """

    def __init__(
        self,
        sources: Sources,
        ttl_s: float = 60.0,
        stale_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
        rejected: RejectedVersions | None = None,
    ) -> None:
        """Whoever loads the versions adds those that cannot be served to `rejected`, with the time of `clock`."""
        self._rejected = rejected_versions() if rejected is None else rejected
        self.sources, self._clock = sources, clock
        self._ttl_s, self._stale_s = ttl_s, stale_s
        self._answers: SizedCache[_Key, _CachedAnswer] = SizedCache(
            MAX_RESOLVED_BYTES, lambda key, answer: 3 * len(key[0].id) + len(answer.resolved.real_id)
        )
        """Without a token's hash: for everyone, as the adapter is public."""
        self._refusals: SizedCache[_Key, dict[str, Any]] = SizedCache(
            MAX_REFUSED_BYTES, lambda key, refusal: len(key[0].id) + len(refusal["message"]), ttl_s, clock
        )
        self._asking: dict[_Key, asyncio.Task[Resolved]] = {}
        self._num_asked = Counter[str]()
        """Questions by caller, those that wait included."""
        self._rooms: dict[str, asyncio.Semaphore] = {}
        """Of the callers with questions."""

    async def resolve(self, ref: Ref, token: str | None, asker: str = "") -> Resolved:
        """The version that `ref` names, for the holder of `token`. Raises a leaf of AdapterError.

        `asker` is the caller who sent the request, "" for the operator.
        """
        everyone, caller = (ref, None), (ref, _hash(token))
        now = self._clock()
        for key in (everyone, caller):
            answer = self._answers.get(key)
            if answer is not None and now - answer.at < self._lifetime(answer) and not self._is_rejected(answer, now):
                return answer.resolved
        if (refusal := self._refusals.get(caller)) is not None:
            raise from_dict(refusal)
        if (task := self._asking.get(caller)) is None:
            task = self._asking[caller] = asyncio.create_task(self._ask(ref, token, caller, asker))
            task.add_done_callback(lambda _: self._asking.pop(caller, None))
        # a caller that disconnects must not cancel the request for others that wait for the same answer
        return await asyncio.shield(task)

    def forget(self, ref: Ref | None = None) -> bool:
        """Ask the source again at the next request for `ref`, or for all. Returns whether one was known to exist."""
        is_known = False
        for cache in (self._answers, self._refusals):
            for key, _ in cache.items():
                if ref is None or key[0] == ref:
                    cache.pop(key)
                    is_known = is_known or cache is self._answers
        return is_known

    def _lifetime(self, answer: _CachedAnswer) -> float:
        """Seconds that an answer is cached."""
        return min(self._ttl_s, LOCAL_S) if answer.resolved.pin.source is SourceKind.LOCAL else self._ttl_s

    def _is_rejected(self, answer: _CachedAnswer, now: float) -> bool:
        """Whether the version cannot be served, and another one may have replaced it."""
        pin = answer.resolved.pin
        rejected_at = self._rejected.get(pin)
        if rejected_at is None or rejected_at < answer.at:
            return False
        return pin.source is SourceKind.LOCAL or now - answer.at >= LOOKUP_S

    @asynccontextmanager
    async def _room(self, asker: str) -> AsyncIterator[None]:
        """Room for one question."""
        if not asker:
            yield
            return
        self._num_asked[asker] += 1
        try:
            async with self._rooms.setdefault(asker, asyncio.Semaphore(MAX_ASKED)):
                yield
        finally:
            self._num_asked[asker] -= 1
            if not self._num_asked[asker]:
                del self._num_asked[asker], self._rooms[asker]

    async def _ask(self, ref: Ref, token: str | None, caller: _Key, asker: str) -> Resolved:
        try:
            async with self._room(asker):
                resolved = await self.sources[ref.source].resolve(ref, token)
        except (AdapterNotFound, AdapterNotAllowed) as error:
            self._answers.pop(caller)
            if ref.source is not SourceKind.LOCAL:
                self._refusals.put(caller, error.as_dict())
            raise
        except SourceUnreachable as error:
            return self._without_source(ref, caller, error)
        key = (ref, None) if resolved.is_public else caller
        if not resolved.is_public:
            self._answers.pop((ref, None))
        self._refusals.pop(caller)
        self._answers.put(key, _CachedAnswer(self._clock(), resolved))
        return resolved

    def _without_source(self, ref: Ref, caller: _Key, error: SourceUnreachable) -> Resolved:
        public = self._answers.get((ref, None))
        if public is not None:
            return public.resolved
        answer = self._answers.get(caller)
        if answer is not None and self._clock() - answer.at <= self._stale_s:
            return answer.resolved
        raise error


def _hash(token: str | None) -> bytes:
    return b"" if token is None else hashlib.sha256(token.encode(errors="surrogatepass")).digest()
