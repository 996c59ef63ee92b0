"""Loads the contents of adapters: one call to the loader per content, for all requests that wait for it.

A known content is used for a minute; then the loader is called again, which protects the file from eviction while it is
in use, and loads it again where it is gone.

The client of the loader's process speaks one JSON object per line over a private Unix socket, and reconnects when the
process was replaced.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import structlog

from lorikeet.adapters.errors import (
    AdapterError,
    AdapterInvalid,
    AdapterNotAllowed,
    AdapterNotFound,
    AdapterTooLarge,
    LoaderFailed,
    NotServed,
    from_dict,
)
from lorikeet.adapters.refs import Ref
from lorikeet.adapters.sources.registry import rejected_versions
from lorikeet.router.metrics.groups import AdapterMetrics
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, Loaded

log = structlog.get_logger()

MAX_LINE_BYTES = 4 << 20
CONNECT_S = 30.0
"""A call fails after so long without a connection."""
_RETRY_S = 0.1


class LoaderLost(LoaderFailed):
    """The loader's process ended, or never started."""

    status = 503
    retry_after = 1.0


@dataclass(eq=False)
class Call:
    """One call without an answer yet."""

    number: int
    body: dict[str, Any]
    answer: "asyncio.Future[dict[str, Any]]"
    timer: asyncio.TimerHandle | None = None


class LoaderClient:
    """Keeps one connection to the loader open while `run` runs."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        """Without an answer yet, sent or not, by number."""
        self._held: set[str] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path, limit=MAX_LINE_BYTES)
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            log.info("loader_connected")
            self._writer = writer
            for digest in self._held:  # a new process has no holds
                self.notify({"hold": digest})
            for call in self._calls.values():
                self._send(call)
            try:
                await self._read(reader)
            except (OSError, ValueError, KeyError) as error:
                log.warning("loader_answer_malformed", kind=type(error).__name__)
            finally:
                self._writer = None
                writer.close()
                for call in list(self._calls.values()):
                    self._fail(call, "the adapter loader ended during the call")
            log.warning("loader_lost")

    def ask(self, body: dict[str, Any]) -> Call:
        """Send a call now, or once the loader is connected. The answer raises AdapterError."""
        loop = asyncio.get_running_loop()
        call = Call(next(self._numbers), body, loop.create_future())
        self._calls[call.number] = call
        call.answer.add_done_callback(lambda _: self._forget(call))
        if self._writer is not None:
            self._send(call)
        else:
            call.timer = loop.call_later(CONNECT_S, self._fail, call, "the adapter loader is not running")
        return call

    def cancel(self, call: Call) -> None:
        """Tell the loader that the answer of `call` is not needed any more."""
        if not call.answer.done():
            call.answer.cancel()
            self.notify({"cancel": call.number})

    def urgent(self, call: Call) -> None:
        """A request has waited long for it."""
        self.notify({"urgent": call.number})

    def share(self, call: Call, caller: str) -> None:
        """Another caller waits for it too."""
        self.notify({"share": call.number, "caller": caller})

    def verify(self, digest: str) -> None:
        """Compare a stored file with its checksum; it is removed where they differ."""
        self.notify({"verify": digest})

    def hold(self, digest: str) -> None:
        """Keep a content on disk, also after the loader is replaced."""
        self._held.add(digest)
        self.notify({"hold": digest})

    def release(self, digest: str) -> None:
        """Allow its eviction."""
        self._held.discard(digest)
        self.notify({"release": digest})

    def notify(self, body: dict[str, Any]) -> None:
        """Send a call whose answer is not needed."""
        if self._writer is not None:
            self._write(next(self._numbers), body)

    def _send(self, call: Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        try:
            self._write(call.number, call.body)
        except ValueError as error:
            if not call.answer.done():
                call.answer.set_exception(AdapterInvalid(f"the adapter cannot be loaded: {error}"))

    def _write(self, number: int, body: dict[str, Any]) -> None:
        """Raises ValueError for a call that the loader would not read: it fails alone."""
        assert self._writer is not None
        try:
            line = orjson.dumps({"call": number, **body}) + b"\n"
        except TypeError:
            raise ValueError("its name or token is not valid Unicode") from None
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"the call has {len(line)} bytes; the limit is {MAX_LINE_BYTES}")
        with contextlib.suppress(OSError):
            self._writer.write(line)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = orjson.loads(line)
            call = self._calls.get(answer["call"])
            if call is None or call.answer.done():
                continue
            error = answer.get("error")
            if error is not None:
                call.answer.set_exception(from_dict(error))
            else:
                call.answer.set_result(answer)

    @staticmethod
    def _fail(call: Call, reason: str) -> None:
        if not call.answer.done():
            call.answer.set_exception(LoaderLost(reason))

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.number, None)
        if call.timer is not None:
            call.timer.cancel()
        if not call.answer.cancelled():
            call.answer.exception()  # retrieved, so that asyncio does not warn where nothing awaits it


def loaded(answer: dict[str, Any]) -> Loaded:
    """Parse an answer to `fetch` or `merge`. Raises LoaderFailed."""
    try:
        digest, tier, num_heads = str(answer["digest"]), str(answer["tier"]), int(answer.get("num_heads", 0))
        ids = tuple(map(int, answer.get("invocation_ids", ())))
        return Loaded(
            digest,
            int(answer["num_bytes"]),
            int(answer["rank"]),
            tier,
            num_heads,
            ids,
            answer.get("changes_nothing") is True,
            None if (scaling := answer.get("scaling")) is None else float(scaling),
            int(answer.get("num_virtual", 0)),
        )
    except (KeyError, TypeError, ValueError):
        raise LoaderFailed("the adapter loader's answer could not be read") from None


FRESH_S = 60.0
URGENT_S = 2.0
MAX_KNOWN = 16_384


@dataclass
class _Load:
    """One content that is being loaded, and the requests that wait for it."""

    adapter: Adapter
    """With the token of the request that it is loaded for."""
    began_at: float
    waiting: dict[int, tuple[Adapter, "asyncio.Future[Loaded]"]] = field(default_factory=dict)
    """By the request's number: each request names the adapter with a token of its own."""
    call: Call | None = None
    timer: asyncio.TimerHandle | None = None
    was_lost: bool = False

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Loading:
    """The contents that are known, and those that are being loaded. Lives in one event loop."""

    def __init__(self, loader: LoaderClient, metrics: AdapterMetrics) -> None:
        self._loader = loader
        self._metrics = metrics
        self._known: OrderedDict[str, tuple[Loaded, float]] = OrderedDict()
        """By content, with the time of the loader's answer; least recently used first."""
        self._loads: dict[str, _Load] = {}
        self._load_of: dict[int, tuple[_Load, str]] = {}
        """By the number of the waiting request, with its flow."""
        self._num_waiting: Counter[str] = Counter()
        """By flow."""
        self._stale: OrderedDict[str, None] = OrderedDict()
        """Digests that a shard could not read, until the loader has loaded them again."""
        self._paused: dict[str, asyncio.Event] = {}
        """Digests whose files are being removed; set once they are."""
        self._parked: dict[str, list[_Load]] = {}
        """Loads that wait for the removal of their content."""
        self.rejected = rejected_versions()

    def known(self, adapter: Adapter) -> Loaded | None:
        """The loader's last answer for this content, if it is recent."""
        answer = self._known.get(adapter.content)
        if answer is None or time.monotonic() - answer[1] > FRESH_S:
            return None
        self._known.move_to_end(adapter.content)
        return answer[0]

    @property
    def num_known(self) -> int:
        return len(self._known)

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    def names_loading(self, most: int) -> list[str]:
        """Up to `most` of them, as clients call them."""
        return [load.adapter.alias or load.adapter.name for load in itertools.islice(self._loads.values(), most)]

    def num_waiting(self, flow: str) -> int:
        return self._num_waiting[flow]

    def wait(self, adapter: Adapter, generation: Generation) -> "asyncio.Future[Loaded]":
        """The content for a request, or the AdapterError that prevents it; cancelled if the request leaves before."""
        routing = generation.routing
        load = self._loads.get(adapter.content)
        is_new = load is None
        if load is None:
            load = self._loads[adapter.content] = _Load(adapter, time.monotonic())
        awaited: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        load.waiting[routing.number] = (adapter, awaited)
        self._load_of[routing.number] = (load, routing.flow)
        self._num_waiting[routing.flow] += 1
        if is_new:
            self._ask(load)
        elif load.call is not None and adapter.caller != load.adapter.caller:
            self._loader.share(load.call, adapter.caller)
        return awaited

    async def content(self, adapter: Adapter) -> Loaded:
        """The content of an adapter, for an operator. Raises AdapterError."""
        known = self.known(adapter)
        if known is not None:
            return known
        began = time.monotonic()
        try:
            content = loaded(await self._loader.ask(adapter.load_call).answer)
            while (removed := self._paused.get(content.digest)) is not None:
                await removed.wait()
                content = loaded(await self._loader.ask(adapter.load_call).answer)
        except AdapterError as error:
            self._reject(adapter, error)
            raise
        self._remember(adapter, content)
        self._note_loaded(adapter, content, time.monotonic() - began)
        return content

    def leave(self, generation: Generation) -> None:
        """Note that `generation` ended, possibly while it waited. The last one that leaves cancels the load."""
        number = generation.routing.number
        if number not in self._load_of:
            return
        load, _ = self._load_of[number]
        self._remove(load, number).cancel()
        if not load.waiting:
            del self._loads[load.adapter.content]
            load.stop_timer()
            if load.call is not None:
                self._loader.cancel(load.call)

    def contents(self) -> list[tuple[str, Loaded]]:
        """All that is known, by content."""
        return [(content, known) for content, (known, _) in self._known.items()]

    def digests_by_name(self) -> dict[str, set[str]]:
        """The known digests of all versions, by source and id."""
        digests: dict[str, set[str]] = {}
        for content, known in self.contents():
            digests.setdefault(content.rpartition("@")[0], set()).add(known.digest)
        return digests

    def without_effect(self) -> set[str]:
        """The known digests of adapters that change nothing."""
        return {known.digest for _, known in self.contents() if known.changes_nothing}

    def digests(self, refs: Iterable[Ref]) -> set[str]:
        """The known digests of these adapters, of any version."""
        names = tuple(f"{ref.source.value}:{ref.id}@" for ref in refs)
        return {known.digest for content, known in self.contents() if content.startswith(names)}

    def forget(self, digest: str, *, is_stale: bool = False) -> None:
        """The file of `digest` is gone: ask the loader before the next use. `is_stale`: requests that have it load it
        again.
        """
        for content, known in self.contents():
            if known.digest == digest:
                del self._known[content]
        if is_stale:
            self._stale[digest] = None
            if len(self._stale) > MAX_KNOWN:
                self._stale.popitem(last=False)

    def is_stale(self, digest: str) -> bool:
        return digest in self._stale

    @contextmanager
    def paused(self, digest: str) -> Iterator[None]:
        """Inside, no request gets this content; those that wait for it have it loaded again afterwards."""
        self.forget(digest)
        removed = self._paused.setdefault(digest, asyncio.Event())
        try:
            yield
        finally:
            if self._paused.get(digest) is removed:
                del self._paused[digest]
                removed.set()
            for load in self._parked.pop(digest, ()):
                if load.waiting:
                    self._ask(load)

    def _ask(self, load: _Load) -> None:
        loop = asyncio.get_running_loop()
        call = load.call = self._loader.ask(load.adapter.load_call)
        call.answer.add_done_callback(lambda answer: self._on_answer(load, call, answer))
        waited = time.monotonic() - load.began_at
        load.timer = loop.call_later(max(0.0, URGENT_S - waited), self._loader.urgent, call)

    def _on_answer(self, load: _Load, call: Call, answer: "asyncio.Future[dict[str, object]]") -> None:
        if answer.cancelled() or load.call is not call:
            return
        load.stop_timer()
        try:
            content = loaded(answer.result())
        except AdapterError as error:
            self._on_error(load, error)
            return
        if content.digest in self._paused:
            self._parked.setdefault(content.digest, []).append(load)
            return
        self._remember(load.adapter, content)
        self._note_loaded(load.adapter, content, time.monotonic() - load.began_at)
        del self._loads[load.adapter.content]
        for awaited in self._take(load):
            awaited.set_result(content)

    def _remember(self, adapter: Adapter, content: Loaded) -> None:
        in_store = replace(content, tier="disk")  # later requests find it there, wherever it came from
        self._stale.pop(content.digest, None)
        self._known[adapter.content] = (in_store, time.monotonic())
        self._known.move_to_end(adapter.content)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _on_error(self, load: _Load, error: AdapterError) -> None:
        if isinstance(error, LoaderLost) and not load.was_lost:
            load.was_lost = True
            self._ask(load)
            return
        log.info("adapter_failed", adapter=load.adapter.name[:256], kind=type(error).__name__, reason=str(error)[:512])
        self._reject(load.adapter, error)
        refused = load.adapter.token
        # Where access was denied, requests that came with another token may have it.
        is_denied = isinstance(error, AdapterNotAllowed | AdapterNotFound)
        failed = self._take(load, lambda adapter: not is_denied or adapter.token == refused)
        if load.waiting:
            load.adapter = next(adapter for adapter, _ in load.waiting.values())
            self._ask(load)
        else:
            del self._loads[load.adapter.content]
        for awaited in failed:
            awaited.set_exception(error)

    def _reject(self, adapter: Adapter, error: AdapterError) -> None:
        """Another version may be there at the next request: the upload may have been incomplete."""
        if isinstance(error, AdapterInvalid | AdapterNotFound | AdapterTooLarge | NotServed):
            for pin in adapter.pins:
                self.rejected.put(pin, time.monotonic())

    def _take(
        self, load: _Load, is_taken: Callable[[Adapter], bool] = lambda adapter: True
    ) -> "list[asyncio.Future[Loaded]]":
        """Remove requests that wait; returns what they wait for, in the order of their arrival."""
        numbers = [number for number, (adapter, _) in load.waiting.items() if is_taken(adapter)]
        return [self._remove(load, number) for number in numbers]

    def _remove(self, load: _Load, number: int) -> "asyncio.Future[Loaded]":
        _, flow = self._load_of.pop(number)
        self._num_waiting[flow] -= 1
        if not self._num_waiting[flow]:
            del self._num_waiting[flow]
        return load.waiting.pop(number)[1]

    def _note_loaded(self, adapter: Adapter, content: Loaded, seconds: float) -> None:
        """The loader has loaded an adapter."""
        self._metrics.loaded(content.tier, seconds)
        digest, seconds = content.digest[:16], round(seconds, 3)
        fields = {"tier": content.tier, "rank": content.rank, "num_bytes": content.num_bytes, "seconds": seconds}
        log.info("adapter_loaded", adapter=adapter.name[:256], digest=digest, **fields)
