"""One picture of the router and its shards: counts, states and names of adapters, but no text of any request."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.live.failures import RecentFailures
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.link import ShardLink

MAX_ADAPTERS = 48
"""Those with the most requests; the others are summed up."""
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
                "running": sum(each["running"] for each in adapters),
                "waiting": sum(each["waiting"] for each in adapters),
                "preempted": sum(each["preempted"] for each in adapters),
            },
            "adapters": _bounded(adapters),
            "tiers": self._tiers(),
            "drafts": self._drafts(),
            "shards": [self._shard(link) for link in dispatcher.links],
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
        found: dict[str, dict[str, float]] = {}
        for kind, family in (("drafted", "drafted_tokens"), ("accepted", "accepted_tokens")):
            for (method, _), number in values[family].items():
                counts = found.setdefault(method, {"drafted": 0, "accepted": 0})
                counts[kind] += number
        return found

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


def _bounded(adapters: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first ones, and a sum of the others."""
    shown = list(adapters)
    rest = shown[MAX_ADAPTERS:]
    if not rest:
        return shown
    total = {kind: sum(each[kind] for each in rest) for kind in ("running", "waiting", "preempted")}
    return [*shown[:MAX_ADAPTERS], {"name": None, "num_others": len(rest), **total}]
