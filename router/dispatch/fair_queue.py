"""Shares of callers: the fair queue of waiting requests, and how many sequences of each caller shards run at a time.

Callers have equal shares of the queue, and of each caller's its adapters have. They are charged for the prompt when a
request leaves it, and later for its output tokens (`proto/shares.py`). An adapter's weight divides what its requests
are charged, and a caller's weight multiplies its share. `FairQueue` is a pure state machine: no clock, no asyncio.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence

from lorikeet.proto.shares import MAX_UNSTARTED_TOKENS, Lane, Shares, limits_of, short_room
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.link import ShardLink

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


class QueuedRequests:
    """Requests that no shard has: in the queue, or waiting for adapters."""

    def __init__(self) -> None:
        self._by_number: dict[int, Generation] = {}
        self._by_caller: dict[str, dict[int, Generation]] = {}
        """The same of each caller that has any, in the order in which they came."""

    def __len__(self) -> int:
        return len(self._by_number)

    def __getitem__(self, number: int) -> Generation:
        return self._by_number[number]

    def values(self) -> Collection[Generation]:
        return self._by_number.values()

    def add(self, generation: Generation) -> None:
        number, caller = generation.routing.number, generation.request.caller
        self._by_number[number] = self._by_caller.setdefault(caller, {})[number] = generation

    def take(self, number: int) -> Generation | None:
        """Remove a request; None where a shard has it, or none."""
        if (generation := self._by_number.pop(number, None)) is not None:
            caller = generation.request.caller
            del self._by_caller[caller][number]
            if not self._by_caller[caller]:
                del self._by_caller[caller]
        return generation

    @property
    def numbers(self) -> Counter[str]:
        """Requests by caller."""
        return Counter({caller: len(requests) for caller, requests in self._by_caller.items()})

    def newest(self) -> Iterator[Generation]:
        """The newest request of each caller, of those that no shard has had."""
        for requests in self._by_caller.values():
            found = next((each for each in reversed(requests.values()) if each.routing.sent_at is None), None)
            if found is not None:
                yield found


RECENT_S = 2.0
"""A caller without requests stays active for so long: its next one may come at any moment."""


class InFlight:
    """Limits on the sequences of each caller in the shards, so that a short request of another one starts at once.

    A caller alone has no limit. While several are active, each has a fair share of the room: what a caller does not
    need, the others get. Where every active caller asks for more than its share, the room is all that shards can run.
    Where one asks for less, it waits for steps that compute the others' sequences, so the room is what keeps steps
    short. What a caller has beyond its limit is taken back: those sequences wait again, and continue later where they
    were. Times are of time.monotonic().
    """

    def __init__(self, links: Sequence[ShardLink], queue: FairQueue) -> None:
        self._links, self._queue = links, queue
        self._seen: dict[str, float] = {}
        """When each caller had a request last."""
        self._weights: dict[str, float] = {}
        self.limits: dict[str, int] = {}
        """The most sequences, of callers that ask for more than they get."""
        self._is_short = False
        """Whether the room is what keeps steps short."""

    def arrived(self, caller: str, weight: float, now: float) -> None:
        """A request of the caller has arrived, or has ended."""
        self._seen[caller], self._weights[caller] = now, weight

    @property
    def num_active(self) -> int:
        """Callers that were active when the limits were computed, or have come since."""
        return len(self._seen)

    def update(self, now: float) -> None:
        """Compute the limits from what runs and waits."""
        running = self.running
        demand = running + self._queue.num_by_caller
        self._seen |= dict.fromkeys(demand, now)
        self._seen = {name: at for name, at in self._seen.items() if now - at <= RECENT_S}
        self._weights = {name: self._weights.get(name, 1.0) for name in self._seen}
        self.limits, self._is_short = {}, False
        if len(self._seen) < 2:
            return
        asked = {name: max(1, demand[name]) for name in self._seen}
        ready = [link for link in self._links if link.ready]
        room = sum(len(link.running) + max(0, link.credit.num_requests) for link in ready)
        short = sum(short_room(link.info.device) for link in ready if link.info is not None)
        self.limits, self._is_short = limits_of(asked, self._weights, room, short)

    @property
    def running(self) -> Counter[str]:
        """Sequences in shards by caller."""
        return sum((link.num_by_caller for link in self._links), Counter[str]())

    def blocked(self) -> set[str]:
        """Callers that get nothing more."""
        if not self.limits:
            return set()
        running = self.running
        blocked = {name for name, limit in self.limits.items() if running[name] >= limit}
        if self._is_short:
            unstarted = self._unstarted(self.limits)
            blocked |= {name for name, tokens in unstarted.items() if tokens >= MAX_UNSTARTED_TOKENS}
        return blocked

    def excess(self) -> Iterator[tuple[ShardLink, Generation]]:
        """The newest sequences of callers above their limits."""
        running = self.running
        above = {name: running[name] - limit for name, limit in self.limits.items() if running[name] > limit}
        if not above:
            return
        for link, generation in self._newest(above):
            caller = generation.request.caller
            if above[caller] > 0:
                above[caller] -= 1
                yield link, generation

    def room_for(self, caller: str) -> Iterator[tuple[ShardLink, Generation]]:
        """What to take back, one after the other, for a caller of which nothing runs while others have several."""
        running = self.running
        if running[caller]:
            return
        for name, number in running.most_common():
            for link, generation in self._newest((name,)) if number > 1 else ():
                number -= 1
                if number:
                    yield link, generation

    def displaced_by(self, caller: str, queued: QueuedRequests) -> Generation | None:
        """In a full server, the request that makes room for one of `caller`: the newest one that no shard has had, of
        the caller that has the most requests. None where that one has hardly more than `caller`.
        """
        numbers = self.running + queued.numbers
        newest = max(
            queued.newest(),
            key=lambda generation: (numbers[generation.request.caller], generation.routing.number),
            default=None,
        )
        return newest if newest is not None and numbers[newest.request.caller] > numbers[caller] + 1 else None

    def has_fewer(self, caller: str, queued: QueuedRequests) -> bool:
        """Whether another caller would still have more requests if `caller` had one more."""
        numbers = self.running + queued.numbers
        return max(numbers.values(), default=0) > numbers[caller] + 1

    def _newest(self, callers: Container[str]) -> list[tuple[ShardLink, Generation]]:
        """Sequences of these callers in shards, the last one sent first; none that runs alone because of crashes."""
        found = [
            (link, generation)
            for link in self._links
            for generation in link.running.values()
            if generation.request.caller in callers and not generation.routing.poison_tracker.isolation_steps
        ]
        return sorted(found, key=lambda pair: pair[1].routing.placed_at, reverse=True)

    def _unstarted(self, callers: Container[str]) -> Counter[str]:
        """Tokens of prompts that were sent and of which no output has come, by caller."""
        unstarted = Counter[str]()
        for link in self._links:
            for generation in link.running.values():
                if generation.request.caller in callers and not generation.routing.has_output:
                    unstarted[generation.request.caller] += generation.num_known
        return unstarted
