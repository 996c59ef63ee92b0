"""Admission of requests with adapters: their content is resolved before they are queued, and their shard is sent a
prefetch. Also pins, unloads and prefetches adapters in the shards.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import log2

import structlog

from lorikeet.adapters.catalogue import CatalogueEntry
from lorikeet.adapters.errors import AdapterError
from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters.loading import LoaderClient, Loading
from lorikeet.router.errors import RouterError, adapter_problem
from lorikeet.router.metrics.groups import AdapterLoad, AdapterMetrics
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, Loaded
from lorikeet.router.shards.link import ShardLink, adapter_pin
from lorikeet.router.shards.members import Placement

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
