"""The fair queue: one bounded flow per key, deficit round robin between the flows, charged in tokens.

A pure state machine: no clock, no sockets, no asyncio. A flow (an adapter) is charged for the prompt when one of its
requests leaves the queue, and later for its output tokens; the sum divided by the flow's weight stays equal between
flows that always have a request waiting. Within a flow, callers take turns by what they were charged.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from lorikeet.router.turns import Turns

QUANTUM = 64
"""Tokens per round and unit of weight: about a short request, so that flows of short ones alternate within a second."""
_MANY_FLOWS = 1024


class QueueFull(Exception):
    """The flow has reached its limit of waiting requests."""


@dataclass(slots=True)
class _Flow:
    """The waiting requests of one key, and the tokens that it may spend (negative: its debt)."""

    key: str
    weight: float = 1.0
    waiting: Turns[int] = field(default_factory=Turns)
    """Request ids with the tokens charged when they leave the queue."""
    deficit: float = 0.0
    idle_since: float = 0.0
    """The number of rounds when it became empty; an idle flow pays its debt as rounds pass."""


class FairQueue:
    """Requests waiting for a shard. `quantum` tokens per round and unit of weight."""

    def __init__(self, max_waiting: int, quantum: int = QUANTUM) -> None:
        self._max_waiting = max_waiting
        self._quantum = quantum
        self._flows: dict[str, _Flow] = {}
        self._turns: deque[_Flow] = deque()
        """Flows with waiting requests, the current one first."""
        self._place_of: dict[int, tuple[str, str]] = {}
        """Key and caller by request id."""
        self._rounds = 0.0
        self._forget_at = _MANY_FLOWS
        """The number of flows at which idle ones are dropped."""
        self._fresh = True
        """Whether the first flow has not received its quantum for this turn."""

    def __len__(self) -> int:
        return len(self._place_of)

    def num_waiting(self, key: str) -> int:
        flow = self._flows.get(key)
        return 0 if flow is None else len(flow.waiting)

    def push(
        self, key: str, request_id: int, tokens: int, weight: float = 1.0, priority: int = 0, caller: str = ""
    ) -> None:
        """Queue a request that is charged `tokens` when it leaves. Raises QueueFull.

        A caller's requests with the lowest `priority` leave first, in the order of their arrival. `weight` is the
        flow's share of the tokens relative to others; the last value applies.
        """
        if not weight > 0:
            raise ValueError(f"a weight must be positive, got {weight}")
        flow = self._flow(key)
        flow.weight = weight
        if len(flow.waiting) >= self._max_waiting:
            raise QueueFull(key)
        self._activate(flow)
        flow.waiting.push(caller, request_id, tokens, priority)
        self._place_of[request_id] = (key, caller)

    def requeue(self, key: str, request_id: int, tokens: int, caller: str = "") -> None:
        """Requeue a request that had left as its caller's first one, without a limit; its charge is refunded.

        `tokens` are charged when it leaves again. Of several requests, the one requeued last goes first.
        """
        flow = self._flow(key)
        self._activate(flow)
        flow.deficit += tokens
        flow.waiting.put_back(caller, request_id, tokens)
        self._place_of[request_id] = (key, caller)

    def first(self) -> int | None:
        """The next request. No other one may overtake it, or large ones would starve."""
        flow = self._next_flow()
        return None if flow is None else flow.waiting.first()[0]

    def pop(self) -> int | None:
        """Take the next request."""
        flow = self._next_flow()
        if flow is None:
            return None
        request_id, tokens = flow.waiting.first()
        flow.waiting.pop()
        flow.deficit -= tokens
        del self._place_of[request_id]
        if not len(flow.waiting):
            self._deactivate(flow)
        return request_id

    def remove(self, request_id: int) -> bool:
        """Remove a waiting request; False when it is not queued."""
        place = self._place_of.pop(request_id, None)
        if place is None:
            return False
        key, caller = place
        flow = self._flows[key]
        flow.waiting.remove(caller, request_id)
        if not len(flow.waiting):
            self._deactivate(flow)
        return True

    def charge(self, key: str, tokens: int, caller: str = "") -> None:
        """Charge output tokens of a request of `key` that has left the queue."""
        flow = self._flow(key)
        flow.deficit -= tokens
        flow.waiting.charge(caller, tokens)

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
        if not len(flow.waiting):
            flow.deficit = min(0.0, flow.deficit + self._paid(flow))
            self._turns.append(flow)

    def _deactivate(self, flow: _Flow) -> None:
        """An empty flow leaves the round; it keeps its debt but no credit."""
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
            cost = flow.waiting.first()[1]
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
            math.ceil((flow.waiting.first()[1] - flow.deficit) / (self._quantum * flow.weight)) for flow in self._turns
        ]
        rounds = max(0, min(short) - 1)
        for flow in self._turns:
            flow.deficit += rounds * self._quantum * flow.weight
        self._rounds += rounds

    def forget_idle(self) -> None:
        """Drop flows without waiting requests and without debt."""
        for flow in list(self._flows.values()):
            if not len(flow.waiting) and flow.deficit + self._paid(flow) >= 0:
                del self._flows[flow.key]

    def _paid(self, flow: _Flow) -> float:
        """The debt that an idle flow has paid since it became empty."""
        return (self._rounds - flow.idle_since) * self._quantum * flow.weight
