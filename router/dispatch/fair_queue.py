"""Who goes next: one bounded queue per key, deficit round robin between them, charged in tokens.

A pure state machine: no clock, no sockets, no asyncio. A key (an adapter) is charged for the prompt when one of its
requests leaves, and for the tokens that its requests emit later; the sum divided by the key's weight is what stays
equal between keys that always have something waiting.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

QUANTUM = 64
"""Tokens per round and unit of weight: about a short request, so that keys of short ones take turns within a second."""
_MANY_FLOWS = 1024


class QueueFull(Exception):
    """The key's queue holds as many requests as it may."""


@dataclass(slots=True)
class _Flow:
    """One key: its waiting requests in order, and what it may still spend (negative: what it owes)."""

    key: str
    weight: float = 1.0
    waiting: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Request id → tokens charged when it leaves."""
    deficit: float = 0.0
    idle_since: float = 0.0
    """The number of rounds when it last ran empty; an idle key pays its debt as rounds go by."""


class FairQueue:
    """Requests waiting for a shard. `quantum` tokens per round and unit of weight."""

    def __init__(self, max_waiting: int, quantum: int = QUANTUM) -> None:
        self._max_waiting = max_waiting
        self._quantum = quantum
        self._flows: dict[str, _Flow] = {}
        self._turns: deque[_Flow] = deque()
        """Lanes with waiting requests, the one whose turn it is first."""
        self._key_of: dict[int, str] = {}
        self._rounds = 0.0
        self._forget_at = _MANY_FLOWS
        """So many lanes are looked through for those that may be forgotten."""
        self._fresh = True
        """Whether the first lane has yet to get its quantum for this turn."""

    def __len__(self) -> int:
        return len(self._key_of)

    def num_waiting(self, key: str) -> int:
        flow = self._flows.get(key)
        return 0 if flow is None else len(flow.waiting)

    def push(self, key: str, request_id: int, tokens: int, weight: float = 1.0) -> None:
        """Queue a request that is charged `tokens` when it leaves. Raises QueueFull.

        `weight` is how much of the tokens `key` gets, relative to others; the newest word on it holds.
        """
        if not weight > 0:
            raise ValueError(f"a weight must be positive, got {weight}")
        flow = self._flow(key)
        flow.weight = weight
        if len(flow.waiting) >= self._max_waiting:
            raise QueueFull(key)
        self._activate(flow)
        flow.waiting[request_id] = tokens
        self._key_of[request_id] = key

    def put_back(self, key: str, request_id: int, tokens: int) -> None:
        """Let a request that had left be the first of its key again, however many wait; its charge is returned.

        `tokens` are charged when it leaves once more. Of several the last to be put back goes first.
        """
        flow = self._flow(key)
        self._activate(flow)
        flow.deficit += tokens
        flow.waiting[request_id] = tokens
        flow.waiting.move_to_end(request_id, last=False)
        self._key_of[request_id] = key

    def pop(self, fits: Callable[[int], bool]) -> int | None:
        """Take the next request, unless it does not fit: nobody overtakes it then, or large ones would starve."""
        flow = self._next_flow()
        if flow is None:
            return None
        request_id = next(iter(flow.waiting))
        if not fits(request_id):
            return None
        flow.deficit -= flow.waiting.pop(request_id)
        del self._key_of[request_id]
        if not flow.waiting:
            self._deactivate(flow)
        return request_id

    def remove(self, request_id: int) -> bool:
        """Forget a waiting request; False when it is not here."""
        key = self._key_of.pop(request_id, None)
        if key is None:
            return False
        flow = self._flows[key]
        del flow.waiting[request_id]
        if not flow.waiting:
            self._deactivate(flow)
        return True

    def charge(self, key: str, tokens: int) -> None:
        """Charge tokens that a request of `key` emitted after it left."""
        self._flow(key).deficit -= tokens

    def _flow(self, key: str) -> _Flow:
        flow = self._flows.get(key)
        if flow is None:
            if len(self._flows) >= self._forget_at:
                self.forget_idle()
                self._forget_at = max(_MANY_FLOWS, 2 * len(self._flows))
            flow = self._flows[key] = _Flow(key, idle_since=self._rounds)
        return flow

    def _activate(self, flow: _Flow) -> None:
        """A lane that was empty gets its turn."""
        if not flow.waiting:
            paid = (self._rounds - flow.idle_since) * self._quantum * flow.weight
            flow.deficit = min(0.0, flow.deficit + paid)
            self._turns.append(flow)

    def _deactivate(self, flow: _Flow) -> None:
        """An empty lane keeps its debt but saves up nothing."""
        if self._turns and self._turns[0] is flow:
            self._turns.popleft()
            self._fresh = True
        else:
            self._turns.remove(flow)
        flow.deficit = min(0.0, flow.deficit)
        flow.idle_since = self._rounds

    def _next_flow(self) -> _Flow | None:
        """Give quanta in turn until the lane at the front can pay for its oldest request."""
        visits = 0
        while self._turns:
            flow = self._turns[0]
            cost = next(iter(flow.waiting.values()))
            if self._fresh:
                flow.deficit += self._quantum * flow.weight
                self._fresh = False
            if flow.deficit >= cost:
                return flow
            self._turns.rotate(-1)
            self._fresh = True
            self._rounds += 1 / len(self._turns)
            visits += 1
            if visits >= len(self._turns):
                self._skip_rounds()
                visits = 0
        return None

    def _skip_rounds(self) -> None:
        """All lanes are short: give everyone the rounds after which the first of them can pay, bar the last one."""
        short = [
            math.ceil((next(iter(flow.waiting.values())) - flow.deficit) / (self._quantum * flow.weight))
            for flow in self._turns
        ]
        rounds = max(0, min(short) - 1)
        for flow in self._turns:
            flow.deficit += rounds * self._quantum * flow.weight
        self._rounds += rounds

    def forget_idle(self) -> None:
        """Drop keys that wait for nothing and owe nothing any more."""
        for flow in [flow for flow in self._flows.values() if not flow.waiting]:
            paid = (self._rounds - flow.idle_since) * self._quantum * flow.weight
            if flow.deficit + paid >= 0:
                del self._flows[flow.key]
