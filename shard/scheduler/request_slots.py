"""The slots of a running request: of its adapter, and of the Medusa heads that draft for it. Imports no torch."""

from collections.abc import Mapping
from typing import Protocol

from lorikeet.shard.requests.request import Request
from lorikeet.shard.scheduler.adapter_slots import AdapterSlots
from lorikeet.shard.scheduler.learned_heads import LearnedHeads, pair_of


class Owner(Protocol):
    """The scheduler."""

    adapters: AdapterSlots
    learned_heads: LearnedHeads


class RequestSlots:
    """Acquires and releases the slots of one request after another."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def take(self, request: Request) -> bool:
        """Acquire all slots that the request needs, or none and return False."""
        adapters = self._owner.adapters
        if pair_of(request) is not None:
            request.heads_digest = self._wanted_heads(request)
        slots: dict[str, int] = {}
        for digest in request.digests:
            slot = adapters.acquire(digest)
            if slot is None:
                for taken in slots:
                    adapters.release(taken)
                return False
            slots[digest] = slot
        request.slot = slots.get(request.adapter_digest, -1)
        self._set_heads(request, slots)
        return True

    def release(self, request: Request) -> None:
        """Release all slots of the request."""
        for digest in request.digests:
            self._owner.adapters.release(digest)
        request.slot = request.heads_slot = -1
        request.num_heads = 0
        if pair_of(request) is not None:
            request.heads_digest = request.given_heads_digest

    def swap_heads(self, request: Request) -> None:
        """Let the heads draft that the request should have now, if they have a slot."""
        adapters, before, wanted = self._owner.adapters, request.digests, self._wanted_heads(request)
        if wanted == request.heads_digest:
            return
        if wanted and wanted not in before and adapters.acquire(wanted) is None:
            return
        request.heads_digest, request.heads_slot, request.num_heads = wanted, -1, 0
        request.head_ids = ()
        for digest in set(before) - set(request.digests):
            adapters.release(digest)
        self._set_heads(request, {request.adapter_digest: request.slot, wanted: adapters.slot(wanted)})

    def _wanted_heads(self, request: Request) -> str:
        """The learned heads if they have a slot, else those that the request came with: it does not wait for a slot."""
        learned = self._owner.learned_heads.of(request)
        return learned if learned and self._owner.adapters.settle(learned) else request.given_heads_digest

    def _set_heads(self, request: Request, slots: Mapping[str, int]) -> None:
        heads_digest = request.heads_digest or request.adapter_digest
        if heads_digest and request.speculation.takes_heads:
            request.heads_slot, request.num_heads = slots[heads_digest], self._owner.adapters.num_heads(heads_digest)
