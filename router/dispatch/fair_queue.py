"""The fair queue: one bounded flow per key, deficit round robin between the flows, charged in tokens.

A pure state machine: no clock, no sockets, no asyncio. A flow (an adapter) is charged for the prompt when one of its
requests leaves the queue, and later for its output tokens; the sum divided by the flow's weight stays equal between
flows that always have a request waiting.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

QUANTUM = 64
"""Tokens per round and unit of weight: about a short request, so that flows of short ones alternate within a second."""
_MANY_FLOWS = 1024


class QueueFull(Exception):
    """The flow has reached its limit of waiting requests."""


class _Place(NamedTuple):
    """Of a waiting request in its flow; places compare by priority, then by arrival."""

    priority: float
    """Lower ones leave first."""
    number: int
    request_id: int
    tokens: int
    """Charged when it leaves the queue."""


@dataclass(slots=True)
class _Flow:
    """The waiting requests of one key, and the tokens that it may spend (negative: its debt)."""

    key: str
    weight: float = 1.0
    waiting: dict[int, _Place] = field(default_factory=dict)
    """By request id."""
    order: list[_Place] = field(default_factory=list)
    """A heap of the same, and of requests that were removed."""
    deficit: float = 0.0
    idle_since: float = 0.0
    """The number of rounds when it became empty; an idle flow pays its debt as rounds pass."""

    def add(self, place: _Place) -> None:
        self.waiting[place.request_id] = place
        heapq.heappush(self.order, place)

    def first(self) -> _Place:
        """The request that leaves next, where one waits."""
        while self.waiting.get(self.order[0].request_id) is not self.order[0]:
            heapq.heappop(self.order)
        return self.order[0]


class FairQueue:
    """Requests waiting for a shard. `quantum` tokens per round and unit of weight."""

    def __init__(self, max_waiting: int, quantum: int = QUANTUM) -> None:
        self._max_waiting = max_waiting
        self._quantum = quantum
        self._flows: dict[str, _Flow] = {}
        self._turns: deque[_Flow] = deque()
        """Flows with waiting requests, the current one first."""
        self._key_of: dict[int, str] = {}
        self._rounds = 0.0
        self._numbers = itertools.count(1)
        self._forget_at = _MANY_FLOWS
        """The number of flows at which idle ones are dropped."""
        self._fresh = True
        """Whether the first flow has not received its quantum for this turn."""

    def __len__(self) -> int:
        return len(self._key_of)

    def num_waiting(self, key: str) -> int:
        flow = self._flows.get(key)
        return 0 if flow is None else len(flow.waiting)

    def push(self, key: str, request_id: int, tokens: int, weight: float = 1.0, priority: int = 0) -> None:
        """Queue a request that is charged `tokens` when it leaves. Raises QueueFull.

        Of one flow's requests those of the lowest `priority` leave first, in the order of their arrival. `weight` is
        the flow's share of the tokens relative to others; the last value applies.
        """
        if not weight > 0:
            raise ValueError(f"a weight must be positive, got {weight}")
        flow = self._flow(key)
        flow.weight = weight
        if len(flow.waiting) >= self._max_waiting:
            raise QueueFull(key)
        self._activate(flow)
        flow.add(_Place(priority, next(self._numbers), request_id, tokens))
        self._key_of[request_id] = key

    def requeue(self, key: str, request_id: int, tokens: int) -> None:
        """Requeue a request that had left as the first of its flow, without a limit; its charge is refunded.

        `tokens` are charged when it leaves again. Of several requests, the one requeued last goes first.
        """
        flow = self._flow(key)
        self._activate(flow)
        flow.deficit += tokens
        flow.add(_Place(-math.inf, -next(self._numbers), request_id, tokens))
        self._key_of[request_id] = key

    def pop(self, fits: Callable[[int], bool]) -> int | None:
        """Take the next request if it fits. No other one overtakes it otherwise, or large ones would starve."""
        flow = self._next_flow()
        if flow is None:
            return None
        first = flow.first()
        request_id = first.request_id
        if not fits(request_id):
            return None
        del flow.waiting[request_id]
        flow.deficit -= first.tokens
        del self._key_of[request_id]
        if not flow.waiting:
            self._deactivate(flow)
        return request_id

    def remove(self, request_id: int) -> bool:
        """Remove a waiting request; False when it is not queued."""
        key = self._key_of.pop(request_id, None)
        if key is None:
            return False
        flow = self._flows[key]
        del flow.waiting[request_id]
        if not flow.waiting:
            self._deactivate(flow)
        return True

    def charge(self, key: str, tokens: int) -> None:
        """Charge output tokens of a request of `key` that has left the queue."""
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
        """An empty flow joins the round."""
        if not flow.waiting:
            flow.deficit = min(0.0, flow.deficit + self._paid(flow))
            self._turns.append(flow)

    def _deactivate(self, flow: _Flow) -> None:
        """An empty flow leaves the round; it keeps its debt but no credit."""
        flow.order.clear()
        if self._turns and self._turns[0] is flow:
            self._turns.popleft()
            self._fresh = True
        else:
            self._turns.remove(flow)
        flow.deficit = min(0.0, flow.deficit)
        flow.idle_since = self._rounds

    def _next_flow(self) -> _Flow | None:
        """Give quanta in turn until the first flow can pay for its oldest request."""
        visits = 0
        while self._turns:
            flow = self._turns[0]
            cost = flow.first().tokens
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
        """No flow can pay: give each one the quanta of all rounds but the last until the first of them can."""
        short = [
            math.ceil((flow.first().tokens - flow.deficit) / (self._quantum * flow.weight)) for flow in self._turns
        ]
        rounds = max(0, min(short) - 1)
        for flow in self._turns:
            flow.deficit += rounds * self._quantum * flow.weight
        self._rounds += rounds

    def forget_idle(self) -> None:
        """Drop flows without waiting requests and without debt."""
        for flow in list(self._flows.values()):
            if not flow.waiting and flow.deficit + self._paid(flow) >= 0:
                del self._flows[flow.key]

    def _paid(self, flow: _Flow) -> float:
        """The debt that an idle flow has paid since it became empty."""
        return (self._rounds - flow.idle_since) * self._quantum * flow.weight
