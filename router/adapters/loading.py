"""Requests that wait for their adapter's content: one call to the loader per content, whoever waits for it.

Knows the loader and generations; neither queues nor shards. What is known stays known for a minute, then the loader
is asked again: it keeps the file from eviction for whoever asks, and brings it back where it is gone.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from lorikeet.adapters.errors import AdapterError, AdapterNotAllowed, AdapterNotFound
from lorikeet.adapters.refs import Ref
from lorikeet.router.adapters.loader_client import Call, LoaderClient, LoaderLost, loaded
from lorikeet.router.requests.adapter_ref import Adapter, Loaded
from lorikeet.router.requests.generation import Generation

log = structlog.get_logger()

FRESH_SECONDS = 60.0
URGENT_SECONDS = 2.0
MOST_KNOWN = 16_384


@dataclass
class _Load:
    """One content under way and the requests that wait for it, by number."""

    adapter: Adapter
    """With the token of the request it is fetched for."""
    began_at: float
    waiting: dict[int, Generation] = field(default_factory=dict)
    call: Call | None = None
    timer: asyncio.TimerHandle | None = None
    was_lost: bool = False


class Loading:
    """What contents are known, and which are under way. Lives in one event loop."""

    def __init__(
        self,
        loader: LoaderClient,
        on_ready: Callable[[Generation, Loaded], None],
        on_failed: Callable[[Generation, AdapterError], None],
        on_loaded: Callable[[Adapter, Loaded, float], None],
    ) -> None:
        self._loader = loader
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._on_loaded = on_loaded
        self._known: OrderedDict[str, tuple[Loaded, float]] = OrderedDict()
        """By content, with when the loader said so; least recently used first."""
        self._loads: dict[str, _Load] = {}
        self._num_waiting: dict[str, int] = {}
        """By lane."""

    def known(self, adapter: Adapter) -> Loaded | None:
        """What the loader said of this content lately."""
        found = self._known.get(adapter.content)
        if found is None or time.monotonic() - found[1] > FRESH_SECONDS:
            return None
        self._known.move_to_end(adapter.content)
        return found[0]

    @property
    def num_known(self) -> int:
        return len(self._known)

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    def num_waiting(self, flow: str) -> int:
        return self._num_waiting.get(flow, 0)

    def wait(self, adapter: Adapter, generation: Generation) -> None:
        """`on_ready` or `on_failed` will be called for `generation`, unless it leaves before."""
        load = self._loads.get(adapter.content)
        if load is None:
            load = self._loads[adapter.content] = _Load(adapter, time.monotonic())
            load.waiting[generation.number] = generation
            self._ask(load)
        else:
            load.waiting[generation.number] = generation
        generation.awaits = adapter
        self._num_waiting[generation.flow] = self.num_waiting(generation.flow) + 1

    async def content(self, adapter: Adapter) -> Loaded:
        """The same without a request: an operator's wish. Raises AdapterError."""
        known = self.known(adapter)
        if known is not None:
            return known
        began = time.monotonic()
        content = loaded(await self._loader.ask({**adapter.call, "token": adapter.token}).answer)
        self._remember(adapter, content)
        self._on_loaded(adapter, content, time.monotonic() - began)
        return content

    def leave(self, generation: Generation) -> None:
        """It ended while it waited. The last one that leaves ends the load."""
        adapter = generation.awaits
        load = None if adapter is None else self._loads.get(adapter.content)
        if adapter is None or load is None or load.waiting.pop(generation.number, None) is None:
            return
        self._left(generation.flow)
        if not load.waiting:
            del self._loads[adapter.content]
            self._stop(load)

    def contents(self) -> list[tuple[str, Loaded]]:
        """All that is known, by content."""
        return [(content, each) for content, (each, _) in self._known.items()]

    def digests(self, wanted: Iterable[Ref]) -> set[str]:
        """What is known of the named adapters, of whatever version."""
        names = tuple(f"{ref.source.value}:{ref.id}@" for ref in wanted)
        return {each.digest for content, (each, _) in self._known.items() if content.startswith(names)}

    def forget(self, digest: str) -> None:
        """The file seems to be gone: ask the loader before the next use."""
        for content in [content for content, (each, _) in self._known.items() if each.digest == digest]:
            del self._known[content]

    def _ask(self, load: _Load) -> None:
        loop = asyncio.get_running_loop()
        call = load.call = self._loader.ask({**load.adapter.call, "token": load.adapter.token})
        call.answer.add_done_callback(lambda answer: self._answered(load, call, answer))
        waited = time.monotonic() - load.began_at
        load.timer = loop.call_later(max(0.0, URGENT_SECONDS - waited), self._loader.urgent, call)

    def _stop(self, load: _Load) -> None:
        if load.timer is not None:
            load.timer.cancel()
        if load.call is not None:
            self._loader.cancel(load.call)

    def _answered(self, load: _Load, call: Call, answer: "asyncio.Future[dict[str, object]]") -> None:
        if answer.cancelled() or load.call is not call:
            return
        if load.timer is not None:
            load.timer.cancel()
        try:
            self._succeeded(load, loaded(answer.result()))
        except AdapterError as error:
            self._failed(load, error)

    def _succeeded(self, load: _Load, content: Loaded) -> None:
        self._remember(load.adapter, content)
        self._on_loaded(load.adapter, content, time.monotonic() - load.began_at)
        del self._loads[load.adapter.content]
        for generation in self._take(load):
            self._on_ready(generation, content)

    def _remember(self, adapter: Adapter, content: Loaded) -> None:
        self._known[adapter.content] = (content, time.monotonic())
        self._known.move_to_end(adapter.content)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _failed(self, load: _Load, error: AdapterError) -> None:
        if isinstance(error, LoaderLost) and not load.was_lost:
            load.was_lost = True
            self._ask(load)
            return
        log.info("adapter_failed", adapter=load.adapter.name[:256], kind=type(error).__name__, reason=str(error)[:512])
        spared = self._spared(load, error)
        for generation in self._take(load, but=spared):
            self._on_failed(generation, error)
        if spared:
            adapter = next(iter(spared.values())).awaits
            assert adapter is not None
            load.adapter = adapter
            self._ask(load)
        else:
            del self._loads[load.adapter.content]

    def _spared(self, load: _Load, error: AdapterError) -> dict[int, Generation]:
        """Requests that came with another token than the one that was refused."""
        if not isinstance(error, AdapterNotAllowed | AdapterNotFound):
            return {}
        refused = load.adapter.token
        return {
            number: generation
            for number, generation in load.waiting.items()
            if generation.awaits is not None and generation.awaits.token != refused
        }

    def _take(self, load: _Load, but: dict[int, Generation] | None = None) -> list[Generation]:
        """All that wait, in the order of their arrival, without `but`."""
        kept = but or {}
        taken = [generation for number, generation in load.waiting.items() if number not in kept]
        load.waiting = dict(kept)
        for generation in taken:
            self._left(generation.flow)
        return taken

    def _left(self, flow: str) -> None:
        left = self._num_waiting[flow] - 1
        if left:
            self._num_waiting[flow] = left
        else:
            del self._num_waiting[flow]
