"""Waiting items of several callers, who take turns by what they were charged.

A pure state machine: no clock, no asyncio. The next item is the oldest one of the caller that was charged least. A
caller that was idle starts level with the others: it keeps its debt and saves nothing. When nothing waits, debts
are forgotten.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")

_MANY_CALLERS = 1024


@dataclass(slots=True)
class _Lane(Generic[Item]):
    """The waiting items of one caller in order, each with its charge, and what the caller was charged so far."""

    waiting: OrderedDict[Item, float] = field(default_factory=OrderedDict)
    charged: float = 0.0


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
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, caller: str, item: Item, charge: float) -> None:
        """Add an item; the caller is charged when it leaves."""
        self._activated(caller).waiting[item] = charge
        self._num_waiting += 1

    def put_back(self, caller: str, item: Item, charge: float) -> None:
        """Add an item that had left as the caller's first one; its earlier charge is refunded."""
        lane = self._activated(caller)
        lane.charged = max(self._level, lane.charged - charge)
        lane.waiting[item] = charge
        lane.waiting.move_to_end(item, last=False)
        self._num_waiting += 1

    def first(self) -> tuple[Item, float] | None:
        """The next item and its charge."""
        if not self._active:
            return None
        return next(iter(self._active[self._next()].waiting.items()))

    def pop(self) -> Item:
        """Take the next item. Raises ValueError without one."""
        caller = self._next()
        lane = self._active[caller]
        item, charge = lane.waiting.popitem(last=False)
        self._level = max(self._level, lane.charged)
        lane.charged += max(charge, 1.0)
        self._left(caller, lane)
        return item

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
        return min(self._active, key=lambda caller: self._active[caller].charged)

    def _left(self, caller: str, lane: _Lane[Item]) -> None:
        self._num_waiting -= 1
        if not lane.waiting:
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
            lane = self._lanes[caller] = _Lane(charged=self._level)
        return lane

    def _forget_idle(self) -> None:
        """Drop callers that neither wait nor owe anything."""
        kept = {name: lane for name, lane in self._lanes.items() if lane.waiting or lane.charged > self._level}
        self._lanes, self._forget_at = kept, max(_MANY_CALLERS, 2 * len(kept))
