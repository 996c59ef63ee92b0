"""How many sequences of each caller shards may run at a time, so that a short request of another one starts at once.

A caller alone has no limit. While several are active, each has a fair share of the room: what a caller does not need,
the others get. Where every active caller asks for more than its share, the room is all that shards can run. Where one
asks for less, it waits for steps that compute the others' sequences, so the room is what keeps steps short. What a
caller has beyond its limit is taken back: those sequences wait again, and continue later where they were.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence

from lorikeet.proto.shares import MAX_UNSTARTED_TOKENS, limits_of, short_room
from lorikeet.router.dispatch.fair_queue import FairQueue
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.link import ShardLink

RECENT_S = 2.0
"""A caller without requests stays active for so long: its next one may come at any moment."""


class InFlight:
    """The sequences in the shards of one router. Times are of time.monotonic()."""

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

    def displaced_by(self, caller: str, queued: Collection[Generation]) -> Generation | None:
        """In a full server, the request that makes room for one of `caller`: the newest one that no shard has had, of
        the caller that has the most requests. None where that one has hardly more than `caller`.
        """
        numbers = self.running + Counter(generation.request.caller for generation in queued)
        newest = max(
            (generation for generation in queued if generation.routing.sent_at is None),
            key=lambda generation: (numbers[generation.request.caller], generation.routing.number),
            default=None,
        )
        return newest if newest is not None and numbers[newest.request.caller] > numbers[caller] + 1 else None

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
