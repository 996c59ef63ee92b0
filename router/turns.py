"""Waiting items of several callers, who take turns by what they were charged.

A pure state machine: no clock, no asyncio. The next item is of the caller that was charged least; a caller's own items
are in the order of their priority, then of arrival. A caller that was idle starts level with the others: it keeps its
debt and saves nothing. When nothing waits, debts are forgotten.
"""

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

_MANY_CALLERS = 1024


class _Place(NamedTuple, Generic[Item]):
    """Place of an item in its lane; places compare by priority, then by number."""

    priority: float
    """Lower ones leave first."""
    number: int
    item: Item
    charge: float
    """Charge to the caller when the item leaves."""


@dataclass(slots=True)
class _Lane(Generic[Item]):
    """The waiting items of one caller, and what it was charged so far."""

    charged: float
    waiting: dict[Item, _Place[Item]] = field(default_factory=dict)
    order: list[_Place[Item]] = field(default_factory=list)
    """A heap of the same, and of items that were removed."""

    def add(self, place: _Place[Item]) -> None:
        self.waiting[place.item] = place
        heapq.heappush(self.order, place)

    def first(self) -> _Place[Item]:
        while self.waiting.get(self.order[0].item) is not self.order[0]:
            heapq.heappop(self.order)
        return self.order[0]


class Turns(Generic[Item]):
    """Items are hashable and different; the unit of a charge is the user's."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane[Item]] = {}
        """By caller, those of idle callers too."""
        self._active: dict[str, _Lane[Item]] = {}
        self._level = 0.0
        """What the caller of the last item that left had been charged."""
        self._forget_at = _MANY_CALLERS
        """The number of callers at which idle ones are dropped."""
        self._numbers = itertools.count(1)
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, caller: str, item: Item, charge: float, priority: float = 0.0) -> None:
        """Add an item; the caller is charged when it leaves."""
        self._activated(caller).add(_Place(priority, next(self._numbers), item, charge))
        self._num_waiting += 1

    def put_back(self, caller: str, item: Item, charge: float) -> None:
        """Add an item that had left as the caller's first one; its earlier charge is refunded."""
        lane = self._activated(caller)
        lane.charged = max(self._level, lane.charged - charge)
        lane.add(_Place(-math.inf, -next(self._numbers), item, charge))
        self._num_waiting += 1

    def first(self) -> tuple[Item, float]:
        """The next item and its charge. Raises ValueError without one."""
        place = self._active[self._next()].first()
        return place.item, place.charge

    def pop(self) -> Item:
        """Take the next item. Raises ValueError without one."""
        caller = self._next()
        lane = self._active[caller]
        place = lane.first()
        del lane.waiting[place.item]
        self._level = max(self._level, lane.charged)
        lane.charged += max(place.charge, 1.0)
        self._left(caller, lane)
        return place.item

    def remove(self, caller: str, item: Item) -> bool:
        """Remove a waiting item; False where it does not wait."""
        lane = self._active.get(caller)
        if lane is None or lane.waiting.pop(item, None) is None:
            return False
        self._left(caller, lane)
        return True

    def charge(self, caller: str, amount: float) -> None:
        """Charge a caller afterwards, for an item that has left."""
        self._lane(caller).charged += amount

    def _next(self) -> str:
        if len(self._active) == 1:
            return next(iter(self._active))
        return min(self._active, key=lambda caller: self._active[caller].charged)

    def _left(self, caller: str, lane: _Lane[Item]) -> None:
        self._num_waiting -= 1
        if not lane.waiting:
            lane.order.clear()
            del self._active[caller]
        if not self._num_waiting:
            self._lanes.clear()
            self._level = 0.0

    def _activated(self, caller: str) -> _Lane[Item]:
        lane = self._active.get(caller)
        if lane is None:
            lane = self._active[caller] = self._lane(caller)
            lane.charged = max(lane.charged, self._level)
        return lane

    def _lane(self, caller: str) -> _Lane[Item]:
        lane = self._lanes.get(caller)
        if lane is None:
            if len(self._lanes) >= self._forget_at:
                self._forget_idle()
            lane = self._lanes[caller] = _Lane(self._level)
        return lane

    def _forget_idle(self) -> None:
        """Drop callers that neither wait nor owe anything."""
        kept = {name: lane for name, lane in self._lanes.items() if lane.waiting or lane.charged > self._level}
        self._lanes, self._forget_at = kept, max(_MANY_CALLERS, 2 * len(kept))
