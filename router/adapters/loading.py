"""Loads the adapters of requests, which are queued once their contents are resolved; pins and unloads them in shards.

There is one call to the loader per content, for all requests that wait for it. A known content is used for a minute;
then the loader is called again, which protects the file from eviction while it is in use, and loads it again where it
is gone. The client of the loader's process speaks one JSON object per line over a private Unix socket, and reconnects
when the process was replaced. A shard is sent a prefetch.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from math import log2
from typing import Any

import orjson
import structlog

from lorikeet.adapters.catalogue import CatalogueEntry
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
from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.errors import RouterError, adapter_problem
from lorikeet.router.metrics.groups import AdapterLoad, AdapterMetrics
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, Loaded
from lorikeet.router.shards.link import ShardLink, adapter_pin
from lorikeet.router.shards.members import Placement

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


log = structlog.get_logger()

HALF_LIFE_S = 600.0
"""A use counts half as much after so long."""
MAX_KNOWN = 4096
"""Above twice this number of adapters, only the most used ones are kept."""


class Popularity:
    """Decayed counts of uses by digest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._scores: dict[str, float] = {}
        """By digest: log2 of the count, relative to a decay that began at the clock's zero."""
        self._pins: dict[str, tuple[pb.AdapterPin, str]] = {}

    def add(self, pin: pb.AdapterPin, affinity_key: str) -> None:
        """One more use. `affinity_key` decides the shard that holds the content."""
        now = self._clock() / HALF_LIFE_S
        score = self._scores.get(pin.digest, float("-inf"))
        # log2(2^score + 2^now), which never overflows
        larger, smaller = max(score, now), min(score, now)
        self._scores[pin.digest] = larger + log2(1.0 + 2.0 ** (smaller - larger))
        self._pins[pin.digest] = pin, affinity_key
        if len(self._scores) > 2 * MAX_KNOWN:
            for digest in sorted(self._scores, key=self._scores.__getitem__)[:-MAX_KNOWN]:
                self.remove(digest)

    def remove(self, digest: str) -> None:
        """The content is no longer served."""
        self._scores.pop(digest, None)
        self._pins.pop(digest, None)

    def most_used(self) -> list[tuple[pb.AdapterPin, str]]:
        """All contents with their affinity keys, the most used first."""
        return [self._pins[digest] for digest in sorted(self._scores, key=self._scores.__getitem__, reverse=True)]


POLL_S = 0.02


class AdapterAdmission:
    """Admission for one dispatcher."""

    def __init__(
        self, loader: LoaderClient, links: Sequence[ShardLink], placement: Placement, metrics: AdapterMetrics
    ) -> None:
        self._links = links
        self._placement = placement
        self._metrics = metrics
        self._loader = loader
        self.loading = Loading(loader, metrics)
        self._pins: dict[str, pb.AdapterPin] = {}
        """Adapters that are never evicted, by digest."""
        self._popularity = Popularity()
        self._prefetch_queues: dict[int, deque[pb.AdapterPin]] = {}
        """By the index of a shard that was replaced: the adapters that it should load again, one after the other."""
        self._unloading: dict[tuple[int, str], list[asyncio.Future[None]]] = {}
        """Set once a content has left a shard, by the shard's index and the digest."""

    def admit(self, generation: Generation) -> "asyncio.Future[Loaded] | None":
        """None for a request whose adapter and heads are resolved, else what it waits for; see `load`.

        Raises ValidationError where the requested heads do not exist.
        """
        adapters = generation.adapters
        infos = [link.info for link in self._links if link.info is not None]
        adapters.most_composed = min((info.most_composed for info in infos), default=0)
        adapters.max_total_tokens = min((info.max_total_tokens for info in infos), default=0)
        while (unresolved := adapters.next_unresolved) is not None:
            known = self.loading.known(unresolved)
            if known is None:
                return self.loading.wait(unresolved, generation)
            adapters.set_loaded(known)
        generation.admit()
        if adapters.is_activated is False and generation.request.adapter is not None:
            self._metrics.missed_invocation(generation.request.adapter, adapters.digest)
        for adapter, digest in adapters.slot_pins:
            if adapters.affinity_key:
                self.prefetch(digest, adapter, adapters.affinity_key)
        return None

    async def load(self, generation: Generation, awaited: "asyncio.Future[Loaded] | None") -> None:
        """Wait for all that a request needs, of which `admit` has given the first. Raises RouterError."""
        while awaited is not None:
            try:
                content = await awaited
            except AdapterError as error:
                raise self._problem(generation, error) from None
            generation.adapters.set_loaded(content)
            awaited = self.admit(generation)

    def _problem(self, generation: Generation, error: AdapterError) -> RouterError:
        problem = adapter_problem(error)
        if generation.adapters.awaits_heads:
            problem.param = "heads_id"
        elif generation.request.adapter is not None:
            problem.param = generation.request.adapter.request_field
            self._metrics.failed(generation.request.adapter, generation.digest)
        return problem

    def is_current(self, generation: Generation) -> bool:
        """Whether no content of the request was found to be unreadable or removed."""
        return not any(map(self.loading.is_stale, generation.adapters.digests))

    @property
    def pinned(self) -> frozenset[str]:
        return frozenset(self._pins)

    async def content(self, adapter: Adapter) -> Loaded:
        """The content of an adapter, loaded if necessary. Raises AdapterError."""
        return await self.loading.content(adapter)

    async def check(self, adapter: Adapter) -> None:
        """Validate only configuration and headers of the adapter. Raises AdapterError if it is not supported."""
        await self._loader.ask({"check": adapter.pins[0].as_dict(), "token": adapter.token}).answer

    def prefetch(self, digest: str, adapter: Adapter, affinity_key: str = "") -> None:
        """Have the shard that requests with this affinity key, by default the digest, go to load the adapter."""
        link = self._placement.home(affinity_key or digest)
        if link is not None and link.residency.prefetch(digest):
            link.client.send(pb.Command(prefetches=[adapter_pin(adapter, digest)]))

    def forget(self, digest: str) -> None:
        """Ask the loader at the next use."""
        self.loading.forget(digest)

    async def delete(self, digest: str, is_used: Callable[[str], bool]) -> bool:
        """Unload a content and remove its file from the store once no request uses it. Raises AdapterError.

        Requests that come meanwhile wait, and then have it loaded again. False where another process holds the file.
        """
        with self.loading.paused(digest):
            while is_used(digest):  # noqa: ASYNC110 - requests end in many places
                await asyncio.sleep(POLL_S)
            await self.unload(digest)
            return bool((await self._loader.ask({"forget": digest}).answer).get("forgotten", True))

    def pin(self, digest: str, adapter: Adapter) -> None:
        """Keep a content on disk and in its shard, also after the shard is replaced."""
        if digest not in self._pins:
            self._loader.hold(digest)
        self._pins[digest] = adapter_pin(adapter, digest)
        if (owner := self._placement.owner(digest)) is not None:
            self._send_pin(owner, digest)

    def unpin(self, digest: str) -> None:
        """Allow its eviction."""
        if self._pins.pop(digest, None) is not None:
            self._loader.release(digest)
            for link in self._links:
                link.client.send(pb.Command(pins=[pb.Pin(digest=digest, pinned=False)]))

    async def unload(self, digest: str) -> None:
        """Returns once no shard has it any more: requests in flight finish first."""
        self.unpin(digest)
        self._popularity.remove(digest)
        waits = []
        for link in self._links:
            if link.client.connected:
                gone = asyncio.get_running_loop().create_future()
                self._unloading.setdefault((link.index, digest), []).append(gone)
                link.client.send(pb.Command(unload_digests=[digest]))
                waits.append(gone)
        await asyncio.gather(*waits)

    def is_resident(self, digest: str) -> bool:
        """Whether any shard has it in a slot."""
        return any(link.residency.is_resident(digest) for link in self._links)

    def place(self, digests: Sequence[str], elsewhere: str) -> str:
        """The nearest tier in any shard, `slot` or `host`, of all these; `elsewhere` where none has them all."""
        tiers = {link.residency.tier(digests, elsewhere) for link in self._links}
        return next((tier for tier in ("slot", "host") if tier in tiers), elsewhere)

    def tier(self, digests: Iterable[str]) -> str:
        """The nearest place of any of these contents: device (a slot of any shard), host (memory), or disk."""
        places = {self.place([digest], "disk") for digest in digests}
        return "device" if "slot" in places else "host" if "host" in places else "disk"

    def on_connect(self, link: ShardLink) -> None:
        """A new stream: the shard has no pins and no adapters."""
        own = [digest for digest in self._pins if self._placement.owner(digest) is link]
        for digest in own:
            self._send_pin(link, digest)
        num_free = 0 if link.info is None else link.info.adapter_slots - len(own)
        popular = (pin for pin, key in self._popularity.most_used() if self._placement.owner(key) is link)
        if queue := deque(islice((pin for pin in popular if pin.digest not in self._pins), max(0, num_free))):
            log.info("adapter_prefetch_started", shard=link.index, adapters=len(queue))
            self._prefetch_queues[link.index] = queue
            self._prefetch_next(link)

    def on_disconnect(self, link: ShardLink) -> None:
        """The shard's adapters are gone."""
        self._prefetch_queues.pop(link.index, None)
        for index, digest in [key for key in self._unloading if key[0] == link.index]:
            self._on_unloaded(index, digest)

    def record_sent(self, adapter: Adapter, generation: Generation, link: ShardLink) -> None:
        """A request was sent to a shard."""
        tier = link.residency.tier(generation.adapters.adapter_digests, generation.adapters.tier)
        self._metrics.sent(adapter, generation.digest, len(generation.request.prompt_ids), tier)
        for part, digest in generation.adapters.slot_pins:
            self._popularity.add(adapter_pin(part, digest), generation.adapters.affinity_key)

    def note_gauges(self, entries: Iterable[CatalogueEntry], queued: Iterable[Generation]) -> None:
        """Update the gauges before they are exported; `entries` are the operator's aliases."""
        known, loading, pinned = self.loading.num_known, self.loading.num_loading, len(self._pins)
        resident = sum(link.residency.num_resident for link in self._links)
        self._metrics.gauges.update(resident=resident, known=known, loading=loading, pinned=pinned)
        digests = self.loading.digests_by_name()
        loads: dict[str, AdapterLoad] = {}
        for entry in entries:
            names = (f"{version.ref.source.value}:{version.ref.id}" for version in entry.versions)
            known_digests = {digest for name in names for digest in digests.get(name, ())}
            loads[entry.alias] = AdapterLoad(resident=self._num_resident(known_digests))
        for generation in queued:
            self._load_of(generation, loads).waiting_requests += 1
        for link in self._links:
            for generation in link.running.values():
                self._load_of(generation, loads).running_requests += 1
        self._metrics.by_label = loads

    def _num_resident(self, digests: Iterable[str]) -> int:
        return sum(any(map(link.residency.is_resident, digests)) for link in self._links)

    def _load_of(self, generation: Generation, loads: dict[str, AdapterLoad]) -> AdapterLoad:
        """The entry of the request's adapter; a new one that is not kept for the base model."""
        adapter = generation.request.adapter
        if adapter is None:
            return AdapterLoad()
        label = self._metrics.label(adapter, generation.digest)
        if label not in loads:
            loads[label] = AdapterLoad(resident=self._num_resident([generation.digest]))
        return loads[label]

    def update(self, link: ShardLink, states: Iterable[pb.AdapterState]) -> None:
        """A shard reports changes of its adapters."""
        for state in states:
            if link.residency.update(state):
                self._metrics.evictions.add(1, "slot")
            if state.residency in (pb.AdapterState.ABSENT, pb.AdapterState.FAILED):
                self._on_unloaded(link.index, state.digest)
            if state.residency == pb.AdapterState.FAILED:
                log.warning("adapter_failed_in_shard", digest=state.digest[:16], reason=state.reason[:512])
                self.loading.forget(state.digest, is_stale=True)
                self._loader.verify(state.digest)
        self._prefetch_next(link)

    def _prefetch_next(self, link: ShardLink) -> None:
        """Send a shard that was replaced the next prefetch of its queue, unless it is loading an adapter."""
        queue = self._prefetch_queues.get(link.index)
        while queue and not link.residency.loading:
            pin = queue.popleft()
            if link.residency.prefetch(pin.digest):
                link.client.send(pb.Command(prefetches=[pin]))

    def _send_pin(self, link: ShardLink, digest: str) -> None:
        pins = [pb.Pin(digest=digest, pinned=True)]
        link.client.send(pb.Command(pins=pins, prefetches=[self._pins[digest]]))

    def _on_unloaded(self, index: int, digest: str) -> None:
        for future in self._unloading.pop((index, digest), ()):
            if not future.done():
                future.set_result(None)
