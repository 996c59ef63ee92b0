"""What stands before the queue for a request with an adapter: its content must be known, and its shard warned.

Knows the loader, through `loading`, and where adapters are; the queue and the shards are the dispatcher's.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import structlog

from lorikeet.adapters.errors import AdapterError
from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters.loader_client import LoaderClient
from lorikeet.router.adapters.loading import Loading
from lorikeet.router.errors import RouterError, adapter_problem
from lorikeet.router.metrics.adapters import AdapterMetrics
from lorikeet.router.requests.adapter_ref import Adapter, Loaded
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.codec import adapter_pin
from lorikeet.router.shards.connection import ShardLink
from lorikeet.router.shards.placement import Placement

log = structlog.get_logger()


class Admission:
    """Of one dispatcher, whose `enqueue` takes a request whose content is known, and whose `fail` ends one."""

    def __init__(
        self,
        loader: LoaderClient,
        links: Sequence[ShardLink],
        placement: Placement,
        enqueue: Callable[[Generation, str, float], None],
        fail: Callable[[Generation, RouterError], None],
        metrics: AdapterMetrics,
    ) -> None:
        self._links = links
        self._placement = placement
        self._metrics = metrics
        self.loading = Loading(loader, self._ready, self._failed, self._loaded)
        self._enqueue = enqueue
        self._fail = fail
        self._loader = loader
        self._pins: dict[str, pb.AdapterPin] = {}
        """What shall stay, by digest."""
        self._leaving: dict[tuple[int, str], list[asyncio.Future[None]]] = {}
        """Who waits for a content to be gone from a shard, by the shard's index and the digest."""

    def admit(self, generation: Generation) -> None:
        """Queue it where all is known of its adapter and heads, or let it wait for what is not.

        Raises ValidationError where the heads that it asks for are none, and what `enqueue` raises.
        """
        while (missing := generation.contents.missing) is not None:
            known = self.loading.known(missing)
            if known is None:
                self.loading.wait(missing, generation)
                return
            generation.contents.learn(known)
        generation.admit()
        self._queue(generation)

    @property
    def pinned(self) -> frozenset[str]:
        return frozenset(self._pins)

    def leave(self, generation: Generation) -> None:
        """It ended while it waited for a content, or elsewhere."""
        self.loading.leave(generation)

    async def content(self, adapter: Adapter) -> Loaded:
        """What an adapter's content is, loaded where it was not. Raises AdapterError."""
        return await self.loading.content(adapter)

    async def check(self, adapter: Adapter) -> None:
        """Look at the adapter's configuration and headers alone. Raises AdapterError for one that is not served."""
        await self._loader.ask({"check": adapter.pins[0].as_dict(), "token": adapter.token}).answer

    def prefetch(self, digest: str, adapter: Adapter, home: str = "") -> None:
        """Have the shard that it belongs to, or the one of `home`, bring it near."""
        link = self._placement.home(home or digest)
        if link is not None and link.residency.prefetch(digest):
            link.client.tell(pb.Command(prefetches=[adapter_pin(adapter, digest)]))

    async def forget(self, digest: str, disk: bool) -> None:
        """Ask the loader at the next use; with `disk` the file in the store goes too. Raises AdapterError.

        Returns when it has gone: whoever asks next is not told of a file that a shard would look for in vain.
        """
        self.loading.forget(digest)
        if disk:
            await self._loader.ask({"forget": digest}).answer

    def pin(self, digest: str, adapter: Adapter) -> None:
        """Have a content stay, on disk and in its shard, now and after the shard was replaced."""
        if digest not in self._pins:
            self._loader.hold(digest)
        self._pins[digest] = adapter_pin(adapter, digest)
        command = pb.Command(pins=[pb.Pin(digest=digest, pinned=True)], prefetches=[self._pins[digest]])
        if (owner := self._placement.owner(digest)) is not None:
            owner.client.tell(command)

    def unpin(self, digest: str) -> None:
        """Let it go when room is needed."""
        if self._pins.pop(digest, None) is not None:
            self._loader.release(digest)
            for link in self._links:
                link.client.tell(pb.Command(pins=[pb.Pin(digest=digest, pinned=False)]))

    async def unload(self, digest: str) -> None:
        """Returns once nothing is left of it in any shard: requests in flight are waited for."""
        self.unpin(digest)
        waits = []
        for link in self._links:
            if link.client.connected:
                gone = asyncio.get_running_loop().create_future()
                self._leaving.setdefault((link.index, digest), []).append(gone)
                link.client.tell(pb.Command(unload_digests=[digest]))
                waits.append(gone)
        await asyncio.gather(*waits)

    def is_resident(self, digest: str) -> bool:
        """Whether any shard has it in a slot."""
        return any(link.residency.is_resident(digest) for link in self._links)

    def link_up(self, link: ShardLink) -> None:
        """A new stream: the shard knows nothing of what was said on another."""
        for digest, pin in self._pins.items():
            if self._placement.owner(digest) is link:
                link.client.tell(pb.Command(pins=[pb.Pin(digest=digest, pinned=True)], prefetches=[pin]))

    def link_down(self, link: ShardLink) -> None:
        """Whatever was there is gone with the stream."""
        for index, digest in [key for key in self._leaving if key[0] == link.index]:
            self._gone(index, digest)

    def _gone(self, index: int, digest: str) -> None:
        for future in self._leaving.pop((index, digest), ()):
            if not future.done():
                future.set_result(None)

    def sent(self, adapter: Adapter, generation: Generation, link: ShardLink) -> None:
        """A request left for a shard."""
        was_resident = link.residency.is_resident(generation.digest)
        self._metrics.sent(adapter, generation.digest, len(generation.request.prompt_ids), was_resident)

    def note_gauges(self) -> None:
        """Before somebody looks at them."""
        self._metrics.gauges |= {
            "resident": sum(link.residency.num_resident for link in self._links),
            "known": self.loading.num_known,
            "loading": self.loading.num_loading,
            "pinned": len(self._pins),
        }

    def moved(self, link: ShardLink, states: Iterable[pb.AdapterState]) -> None:
        """What a shard says of adapters."""
        for state in states:
            if link.residency.moved(state):
                self._metrics.evictions.add(1, "slot")
            if state.residency in (pb.AdapterState.ABSENT, pb.AdapterState.FAILED):
                self._gone(link.index, state.digest)
            if state.residency == pb.AdapterState.FAILED:
                log.warning("adapter_failed_in_shard", digest=state.digest[:16], reason=state.reason[:512])
                self.loading.forget(state.digest)

    def _queue(self, generation: Generation) -> None:
        contents, adapter = generation.contents, generation.request.adapter
        for pin in (contents.adapter_pin, contents.heads_pin):
            if pin is not None and contents.home:
                self.prefetch(pin[1], pin[0], contents.home)
        self._enqueue(generation, generation.flow, 1.0 if adapter is None else adapter.weight)

    def _ready(self, generation: Generation, content: Loaded) -> None:
        generation.contents.learn(content)
        try:
            self.admit(generation)
        except RouterError as error:
            self._fail(generation, error)
        generation.wake()

    def _failed(self, generation: Generation, error: AdapterError) -> None:
        problem = adapter_problem(error)
        if generation.contents.awaits_heads:
            problem.param = "heads_id"
        elif generation.request.adapter is not None:
            self._metrics.failed(generation.request.adapter, generation.digest)
        self._fail(generation, problem)

    def _loaded(self, adapter: Adapter, content: Loaded, seconds: float) -> None:
        self._metrics.loaded(content.tier, seconds)
        log.info(
            "adapter_loaded",
            adapter=adapter.name[:256],
            digest=content.digest[:16],
            tier=content.tier,
            rank=content.rank,
            num_bytes=content.num_bytes,
            seconds=round(seconds, 3),
        )
