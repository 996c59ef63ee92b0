"""Who may use which adapter: what sources said, remembered per caller and name for a short while. Imports no torch.

A success is a right and a version in one. Remembered: successes and refusals for `ttl_s`; where a source gives no
answer, a public adapter's last version goes on, and a private one's for `stale_s` after the caller's right was proved.
Tokens are kept as hashes alone.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from lorikeet.adapters.errors import AdapterError, AdapterNotAllowed, AdapterNotFound, SourceUnreachable
from lorikeet.adapters.refs import Ref
from lorikeet.adapters.sources.base import Resolved
from lorikeet.adapters.sources.registry import Sources

MOST_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class _Said:
    """One answer of a source and when it was given."""

    at: float
    resolved: Resolved | None = None
    refusal: AdapterError | None = None


_Key = tuple[Ref, bytes | None]


class Rights:
    """All that is remembered about rights. Lives in one event loop."""

    def __init__(
        self,
        sources: Sources,
        ttl_s: float = 60.0,
        stale_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._ttl_s = ttl_s
        self._stale_s = stale_s
        self._clock = clock
        self._said: OrderedDict[_Key, _Said] = OrderedDict()
        """Least recently asked for first. Without a hash: what holds for everyone, as the adapter is public."""
        self._asking: dict[_Key, asyncio.Task[Resolved]] = {}

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        """The version that `ref` names, for the holder of `token`. Raises a leaf of AdapterError."""
        everyone, caller = (ref, None), (ref, _hash(token))
        now = self._clock()
        for key in (everyone, caller):
            said = self._said.get(key)
            if said is not None and now - said.at < self._ttl_s:
                self._said.move_to_end(key)
                return _repeat(said)
        task = self._asking.get(caller)
        if task is None:
            task = self._asking[caller] = asyncio.create_task(self._ask(ref, token, caller))
            task.add_done_callback(lambda _: self._asking.pop(caller, None))
        # One caller that goes away must not end the question for those who wait for the same answer.
        return await asyncio.shield(task)

    def forget(self, ref: Ref | None = None) -> None:
        """Ask the source again at the next request for `ref`, or for anything."""
        for key in [key for key in self._said if ref is None or key[0] == ref]:
            del self._said[key]

    async def _ask(self, ref: Ref, token: str | None, caller: _Key) -> Resolved:
        try:
            resolved = await self._sources[ref.source].resolve(ref, token)
        except (AdapterNotFound, AdapterNotAllowed) as error:
            self._remember(caller, _Said(self._clock(), refusal=error))
            raise
        except SourceUnreachable as error:
            return self._without_source(ref, caller, error)
        key = (ref, None) if resolved.is_public else caller
        if not resolved.is_public:
            self._said.pop((ref, None), None)
        self._remember(key, _Said(self._clock(), resolved))
        return resolved

    def _without_source(self, ref: Ref, caller: _Key, error: SourceUnreachable) -> Resolved:
        public = self._said.get((ref, None))
        if public is not None and public.resolved is not None:
            return public.resolved
        said = self._said.get(caller)
        if said is not None and said.resolved is not None and self._clock() - said.at <= self._stale_s:
            return said.resolved
        raise error

    def _remember(self, key: _Key, said: _Said) -> None:
        self._said[key] = said
        self._said.move_to_end(key)
        while len(self._said) > MOST_REMEMBERED:
            self._said.popitem(last=False)


def _hash(token: str | None) -> bytes:
    return b"" if token is None else hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def _repeat(said: _Said) -> Resolved:
    if said.resolved is not None:
        return said.resolved
    assert said.refusal is not None
    # A new one: an exception that is raised again and again gathers traces.
    refusal = said.refusal
    raise type(refusal)(str(refusal), status=refusal.status, retry_after=refusal.retry_after)
