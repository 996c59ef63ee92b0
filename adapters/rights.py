"""Caches which caller may use which adapter, as sources answered. Imports no torch.

A positive answer is both a right and a version. Answers, positive or negative, are cached for `ttl_s` per caller and
name. While a source does not answer, a public adapter's last version stays valid, and a private one's for `stale_s`
after the caller's right was proved. Only hashes of tokens are stored.
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

MAX_CACHED = 65_536


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer of a source and its time."""

    at: float
    resolved: Resolved | None = None
    refusal: AdapterError | None = None


_Key = tuple[Ref, bytes | None]


class Rights:
    """The cache. Used in one event loop."""

    def __init__(
        self,
        sources: Sources,
        ttl_s: float = 60.0,
        stale_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sources, self._clock = sources, clock
        self._ttl_s, self._stale_s = ttl_s, stale_s
        self._answers: OrderedDict[_Key, _Answer] = OrderedDict()
        """Least recently used first. Without a token's hash: for everyone, as the adapter is public."""
        self._asking: dict[_Key, asyncio.Task[Resolved]] = {}

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        """The version that `ref` names, for the holder of `token`. Raises a leaf of AdapterError."""
        everyone, caller = (ref, None), (ref, _hash(token))
        now = self._clock()
        for key in (everyone, caller):
            answer = self._answers.get(key)
            if answer is not None and now - answer.at < self._ttl_s:
                self._answers.move_to_end(key)
                return _repeat(answer)
        if (task := self._asking.get(caller)) is None:
            task = self._asking[caller] = asyncio.create_task(self._ask(ref, token, caller))
            task.add_done_callback(lambda _: self._asking.pop(caller, None))
        # a caller that disconnects must not cancel the request for others that wait for the same answer
        return await asyncio.shield(task)

    def forget(self, ref: Ref | None = None) -> None:
        """Ask the source again at the next request for `ref`, or for any name."""
        for key in [key for key in self._answers if ref is None or key[0] == ref]:
            del self._answers[key]

    async def _ask(self, ref: Ref, token: str | None, caller: _Key) -> Resolved:
        try:
            resolved = await self.sources[ref.source].resolve(ref, token)
        except (AdapterNotFound, AdapterNotAllowed) as error:
            self._remember(caller, _Answer(self._clock(), refusal=error))
            raise
        except SourceUnreachable as error:
            return self._without_source(ref, caller, error)
        key = (ref, None) if resolved.is_public else caller
        if not resolved.is_public:
            self._answers.pop((ref, None), None)
        self._remember(key, _Answer(self._clock(), resolved))
        return resolved

    def _without_source(self, ref: Ref, caller: _Key, error: SourceUnreachable) -> Resolved:
        public = self._answers.get((ref, None))
        if public is not None and public.resolved is not None:
            return public.resolved
        answer = self._answers.get(caller)
        if answer is not None and answer.resolved is not None and self._clock() - answer.at <= self._stale_s:
            return answer.resolved
        raise error

    def _remember(self, key: _Key, answer: _Answer) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        while len(self._answers) > MAX_CACHED:
            self._answers.popitem(last=False)


def _hash(token: str | None) -> bytes:
    return b"" if token is None else hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def _repeat(answer: _Answer) -> Resolved:
    if answer.resolved is not None:
        return answer.resolved
    assert answer.refusal is not None
    # a new one: an exception that is raised repeatedly accumulates tracebacks
    refusal = answer.refusal
    raise type(refusal)(str(refusal), status=refusal.status, retry_after=refusal.retry_after)
