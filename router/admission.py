"""What stands before the queue for a request with an adapter: its content must be known, and its shard warned.

Knows the loader, through `loading`, and where adapters are; the queue and the shards are the dispatcher's.
"""

from collections.abc import Callable, Iterable

import structlog

from adapters.errors import AdapterError
from proto import shard_pb2 as pb
from router.adapter import Adapter
from router.errors import RouterError, adapter_problem
from router.inflight import Generation
from router.loader_client import Loaded, LoaderClient
from router.loading import Loading
from router.residency import Residency
from router.wire import adapter_pin

log = structlog.get_logger()


class Admission:
    """Of one dispatcher. `enqueue` takes a request whose content is known, `tell` reaches the shard."""

    def __init__(
        self,
        loader: LoaderClient,
        enqueue: Callable[[Generation, str, float], None],
        fail: Callable[[Generation, RouterError], None],
        tell: Callable[[pb.Command], None],
    ) -> None:
        self.residency = Residency()
        self.loading = Loading(loader, self._ready, self._failed, self._loaded)
        self._enqueue = enqueue
        self._fail = fail
        self._tell = tell

    def admit(self, generation: Generation, adapter: Adapter) -> None:
        """Queue it where its adapter's content is known, or let it wait for that. May raise what `enqueue` raises."""
        known = self.loading.known(adapter)
        if known is None:
            self.loading.wait(adapter, generation)
            return
        generation.digest = known.digest
        self._queue(generation, adapter)

    def leave(self, generation: Generation) -> None:
        """It ended while it waited for its content, or elsewhere."""
        if generation.request.adapter is not None:
            self.loading.leave(generation.request.adapter, generation)

    def moved(self, states: Iterable[pb.AdapterState]) -> None:
        """What the shard says of adapters."""
        for state in states:
            self.residency.moved(state)
            if state.residency == pb.AdapterState.FAILED:
                log.warning("adapter_failed_in_shard", digest=state.digest[:16], reason=state.reason[:512])
                self.loading.forget(state.digest)

    def _queue(self, generation: Generation, adapter: Adapter) -> None:
        if self.residency.prefetch(generation.digest):
            self._tell(pb.Command(prefetches=[adapter_pin(adapter, generation.digest)]))
        self._enqueue(generation, adapter.lane, adapter.weight)

    def _ready(self, generation: Generation) -> None:
        assert generation.request.adapter is not None
        try:
            self._queue(generation, generation.request.adapter)
        except RouterError as error:
            self._fail(generation, error)
        generation.wake()

    def _failed(self, generation: Generation, error: AdapterError) -> None:
        self._fail(generation, adapter_problem(error))

    def _loaded(self, adapter: Adapter, content: Loaded, seconds: float) -> None:
        log.info(
            "adapter_loaded",
            adapter=adapter.name[:256],
            digest=content.digest[:16],
            tier=content.tier,
            rank=content.rank,
            num_bytes=content.num_bytes,
            seconds=round(seconds, 3),
        )
