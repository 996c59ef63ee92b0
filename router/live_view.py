"""What the server does now, for pages that show it: one snapshot per interval for all viewers, and recent failures.

A snapshot has counts, states and names of adapters, but no text of any request.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.metrics.groups import Histogram
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.link import ShardLink

MAX_KINDS = 64
SLOT_S = 10
"""Failures are counted by slots of time, so that memory does not grow with their number."""
MINUTE, WINDOW = 60 // SLOT_S, 600 // SLOT_S
"""In slots. A window ends with the running slot, and has up to one more at its begin."""


@dataclass
class _Counts:
    """Failures of one kind."""

    last_at: float = 0.0
    slots: deque[list[int]] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    """[number of the slot, failures in it], the latest last."""

    def add(self, now: float) -> None:
        self.last_at = now
        slot = int(now // SLOT_S)
        if not self.slots or self.slots[-1][0] < slot:
            self.slots.append([slot, 0])
        self.slots[-1][1] += 1

    def since(self, slot: int) -> int:
        return sum(count for number, count in self.slots if number >= slot)


class RecentFailures:
    """Failures of requests to the model. Kinds are leaves of the tree of errors, so there are few."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._found: OrderedDict[tuple[str, int], _Counts] = OrderedDict()
        """By kind and status, the latest last."""

    def add(self, kind: str, status: int) -> None:
        self._found.setdefault((kind, status), _Counts()).add(self._clock())
        self._found.move_to_end((kind, status))
        if len(self._found) > MAX_KINDS:
            self._found.popitem(last=False)

    def shown(self) -> list[dict[str, Any]]:
        """Kinds of the last ten minutes, the latest first: how many in these (`count`), and in the last one."""
        slot = int(self._clock() // SLOT_S)
        return [
            {
                "kind": kind,
                "status": status,
                "count": count,
                "last_minute": counts.since(slot - MINUTE),
                "last_at": round(counts.last_at, 3),
            }
            for (kind, status), counts in reversed(self._found.items())
            if (count := counts.since(slot - WINDOW))
        ]


MAX_ADAPTERS = 48
"""The adapters with the most requests; the others are summed up."""
MAX_LOADING = 32
MAX_PARTS = 64
"""Requests of a step that are shown."""
MAX_NAME = 80


class SnapshotMaker:
    """Reads the state of one router. A snapshot takes a time proportional to the requests inside the server."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, failures: RecentFailures) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._failures = failures

    def make(self) -> dict[str, Any]:
        """Counters are totals since the router's start: a viewer subtracts."""
        metrics, dispatcher = self._metrics, self._dispatcher
        adapters = self._adapters()
        return {
            "time": round(time.time(), 3),
            "generated_tokens": metrics.generated_tokens.values.get("", 0),
            "prompt_tokens": metrics.prompt_tokens.values.get("", 0),
            "requests": {
                "running": sum(adapter["running"] for adapter in adapters),
                "waiting": sum(adapter["waiting"] for adapter in adapters),
                "preempted": sum(adapter["preempted"] for adapter in adapters),
            },
            "adapters": _bounded(adapters),
            "tiers": self._tiers(),
            "drafts": self._drafts(),
            "shards": [self._shard(link) for link in dispatcher.links],
            "latency": {
                "first_token": _bounds(metrics.time_to_first_token),
                "between_tokens": _bounds(metrics.inter_token_latency),
            },
            "failures": self._failures.shown(),
            "draining": dispatcher.draining,
        }

    def _adapters(self) -> list[dict[str, Any]]:
        """Requests by adapter, the busiest first; the base model is None."""
        running, waiting, preempted = Counter[str | None](), Counter[str | None](), Counter[str | None]()
        for generation in self._dispatcher.queued:
            waiting[name_of(generation)] += 1
        for link in self._dispatcher.links:
            ids = frozenset(() if link.step_detail is None else link.step_detail.preempted_ids)
            for wire_id, generation in link.running.items():
                (preempted if wire_id in ids else running)[name_of(generation)] += 1
        names = sorted(
            running.keys() | waiting.keys() | preempted.keys(),
            key=lambda name: (-running[name] - waiting[name] - preempted[name], name or ""),
        )
        return [
            {"name": name, "running": running[name], "waiting": waiting[name], "preempted": preempted[name]}
            for name in names
        ]

    def _tiers(self) -> dict[str, Any]:
        """Adapters by place, and names of those on their way."""
        links, admission = self._dispatcher.links, self._dispatcher.admission
        loading = [] if admission is None else admission.loading.names_loading(MAX_LOADING)
        return {
            "device": sum(link.residency.num_resident for link in links),
            "host": sum(len(link.residency.in_host_memory) for link in links),
            "disk": 0 if admission is None else admission.loading.num_known,
            "from_source": [name[:MAX_NAME] for name in loading],
            "into_slot": sum(len(link.residency.loading) for link in links),
        }

    def _drafts(self) -> dict[str, dict[str, float]]:
        """Draft tokens by source: verified, and accepted."""
        values = self._metrics.speculation.values
        drafts: dict[str, dict[str, float]] = {}
        for kind, family in (("drafted", "drafted_tokens"), ("accepted", "accepted_tokens")):
            for (method, _), number in values[family].items():
                counts = drafts.setdefault(method, {"drafted": 0, "accepted": 0})
                counts[kind] += number
        return drafts

    def _shard(self, link: ShardLink) -> dict[str, Any]:
        info, load = link.info, link.load
        state: dict[str, Any] = {
            "index": link.index,
            "connected": link.client.connected,
            "ready": link.ready,
            "device": None if info is None else info.device,
            "running": len(link.running),
            "resident_adapters": link.residency.num_resident,
            "adapter_slots": 0 if info is None else info.adapter_slots,
        }
        if info is None or load is None or not link.client.connected:
            return state
        return state | {
            "pages": info.num_pages,
            "used_pages": load.used_pages,
            "cached_pages": load.cached_pages,
            "waiting": load.num_waiting,
            "step_ms": load.step_ms,
            "step_tokens": load.step_tokens,
            "step": self._step(link),
        }

    def _step(self, link: ShardLink) -> list[dict[str, Any]]:
        """What a recent step computed, by request."""
        detail = link.step_detail
        if detail is None:
            return []
        parts = zip(detail.ids, detail.num_tokens, detail.num_drafts, strict=True)
        return [
            {
                "request": generation.routing.number,
                "adapter": name_of(generation),
                "tokens": num_tokens,
                "drafts": num_drafts,
                "prefill": num_tokens > 1 or not generation.num_generated,
            }
            for wire_id, num_tokens, num_drafts in list(parts)[:MAX_PARTS]
            if (generation := link.running.get(wire_id)) is not None
        ]


def name_of(generation: Generation) -> str | None:
    """What clients call the adapter of a request."""
    adapter = generation.request.adapter
    return None if adapter is None else (adapter.alias or adapter.name)[:MAX_NAME]


def _bounds(histogram: Histogram) -> list[list[float]]:
    """[bound in seconds, number at most so long] of each bucket but the last, which has no bound."""
    return [[float(bound), count] for bound, count in histogram.buckets()[:-1]]


def _bounded(adapters: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first ones, and a sum of the others."""
    shown = list(adapters)
    rest = shown[MAX_ADAPTERS:]
    if not rest:
        return shown
    total = {kind: sum(adapter[kind] for adapter in rest) for kind in ("running", "waiting", "preempted")}
    return [*shown[:MAX_ADAPTERS], {"name": None, "num_others": len(rest), **total}]


INTERVAL_S = 0.5
WATCH_MS = 4000
"""For so long shards are asked to describe steps, and asked again at half of it."""


class Live:
    """Live snapshots of one router. Without viewers it does nothing."""

    def __init__(self, maker: SnapshotMaker, links: Iterable[ShardLink]) -> None:
        self._maker = maker
        self._links = links
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None
        self.num_made = 0
        """Snapshots since the start."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each a snapshot, until the reader leaves."""
        self._num_viewers += 1
        try:
            while True:
                if self._next is None:
                    self._next = asyncio.get_running_loop().create_future()
                if self._task is None:
                    self._task = asyncio.create_task(self._run())
                yield await asyncio.shield(self._next)
        finally:
            self._num_viewers -= 1

    async def _run(self) -> None:
        """Make snapshots until nobody watches."""
        num_since = 0
        try:
            while self._num_viewers:
                if num_since % max(1, int(WATCH_MS / 2000 / INTERVAL_S)) == 0:
                    for link in self._links:
                        link.watch(WATCH_MS)
                num_since += 1
                waiting, self._next = self._next, None
                if waiting is not None:
                    self._make(waiting)
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._task = None

    def _make(self, waiting: "asyncio.Future[bytes]") -> None:
        """Viewers get an error where it fails."""
        self.num_made += 1
        try:
            waiting.set_result(b"data: " + orjson.dumps(self._maker.make()) + b"\n\n")
        except Exception as error:
            waiting.set_exception(error)
