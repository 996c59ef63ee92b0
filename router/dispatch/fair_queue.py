"""The fair queue: requests waiting for a shard. Callers have equal shares, and of each caller's its adapters have.

A pure state machine: no clock, no sockets, no asyncio. Callers and adapters are charged for the prompt when a request
leaves the queue, and later for its output tokens (`proto/shares.py`). An adapter's weight divides what its requests
are charged, and a caller's weight multiplies its share.
"""

from collections import Counter
from collections.abc import Container

from lorikeet.proto.shares import Lane, Shares

_MANY_CALLERS = 4096


class QueueFull(Exception):
    """The adapter has reached its limit of waiting requests."""


class _Caller:
    """The waiting requests of one caller, by adapter."""

    def __init__(self) -> None:
        self.adapters = Shares()
        self.lanes: dict[str, Lane[int]] = {}
        """Request ids with the tokens charged when they leave, of adapters with waiting requests."""

    def lane(self, adapter: str) -> Lane[int]:
        return self.lanes.setdefault(adapter, Lane())


class FairQueue:
    """At most `max_waiting` requests of each adapter wait."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._shares = Shares()
        self._callers: dict[str, _Caller] = {}
        """Those with waiting requests, and those whose tokens arrive."""
        self._place_of: dict[int, tuple[str, str]] = {}
        """Adapter and caller by request id."""
        self._num_waiting = Counter[str]()
        """By adapter."""
        self.num_by_caller = Counter[str]()
        """Waiting requests by caller, of those that have any."""

    def __len__(self) -> int:
        return len(self._place_of)

    def num_waiting(self, adapter: str) -> int:
        return self._num_waiting[adapter]

    def push(
        self,
        adapter: str,
        request_id: int,
        tokens: int,
        weight: float = 1.0,
        priority: int = 0,
        caller: str = "",
        share: float = 1.0,
    ) -> None:
        """Queue a request that is charged `tokens` when it leaves. Raises QueueFull.

        A caller's requests of an adapter with the lowest `priority` leave first, in the order of their arrival.
        `weight` is the adapter's, `share` the caller's; the last values apply.
        """
        if not (weight > 0 and share > 0):
            raise ValueError(f"weights must be positive, got {weight} and {share}")
        if self._num_waiting[adapter] >= self._max_waiting:
            raise QueueFull(adapter)
        entry = self._joined(caller, adapter, request_id)
        entry.adapters.join(adapter, weight)
        self._shares.join(caller, share)
        entry.lane(adapter).add(request_id, tokens, priority)

    def requeue(self, adapter: str, request_id: int, tokens: int, caller: str = "") -> None:
        """Requeue a request that had left as its caller's first one of the adapter, without a limit; its charge is
        refunded. `tokens` are charged when it leaves again. Of several requests, the one requeued last goes first.
        """
        entry = self._joined(caller, adapter, request_id)
        entry.adapters.join(adapter, entry.adapters.weight(adapter))
        self._shares.join(caller, self._shares.weight(caller))
        entry.lane(adapter).put_back(request_id, tokens)
        self.charge(adapter, -tokens, caller)

    def first(self, blocked: Container[str] = ()) -> int | None:
        """The next request, of the callers that are not blocked. No other one may overtake it, or large ones would
        starve.
        """
        caller = self._shares.next(blocked)
        if caller is None:
            return None
        entry = self._callers[caller]
        adapter = entry.adapters.next()
        assert adapter is not None
        request_id, _ = entry.lanes[adapter].first()
        return request_id

    def take(self, request_id: int) -> None:
        """Take a waiting request, and charge it: the one that `first` returned, though others may be first by now."""
        adapter, caller = self._place_of[request_id]
        entry = self._callers[caller]
        tokens = entry.lanes[adapter].work(request_id)
        entry.adapters.take_turn(adapter, tokens)
        self._shares.take_turn(caller, tokens / entry.adapters.weight(adapter))
        self.remove(request_id)

    def remove(self, request_id: int) -> bool:
        """Remove a waiting request; False when it is not queued."""
        place = self._place_of.pop(request_id, None)
        if place is None:
            return False
        adapter, caller = place
        entry = self._callers[caller]
        entry.lanes[adapter].remove(request_id)
        for counts, name in ((self._num_waiting, adapter), (self.num_by_caller, caller)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]
        if not len(entry.lanes[adapter]):
            del entry.lanes[adapter]
            entry.adapters.leave(adapter)
        if not entry.lanes:
            self._shares.leave(caller)
        return True

    def charge(self, adapter: str, tokens: int, caller: str = "") -> None:
        """Charge output tokens of a request that has left the queue."""
        if (entry := self._callers.get(caller)) is None:
            return
        entry.adapters.charge(adapter, tokens)
        self._shares.charge(caller, tokens / entry.adapters.weight(adapter))

    def forget_idle(self) -> None:
        """Nothing runs: forget callers and adapters without waiting requests, and what they owe."""
        self._shares.forget_idle()
        self._callers = {name: caller for name, caller in self._callers.items() if caller.lanes}
        for caller in self._callers.values():
            caller.adapters.forget_idle()

    def _joined(self, caller: str, adapter: str, request_id: int) -> _Caller:
        """The caller of another waiting request."""
        if (entry := self._callers.get(caller)) is None:
            if len(self._callers) > _MANY_CALLERS:
                self._forget_callers()
            entry = self._callers[caller] = _Caller()
        self._place_of[request_id] = (adapter, caller)
        self._num_waiting[adapter] += 1
        self.num_by_caller[caller] += 1
        return entry

    def _forget_callers(self) -> None:
        """Forget callers that the shares have forgotten, and the oldest of the others without waiting requests."""
        idle = [name for name, caller in self._callers.items() if not caller.lanes]
        for name in idle[: len(idle) // 2 + 1]:
            del self._callers[name]
