"""Fair shares of one resource: who is next, by the work that each was charged, and how much each may have at a time.

Start-time fair queueing. A member (a caller, an adapter) has a time: the work that it was charged, divided by its
weight. The next turn is of the waiting member with the least time, and the clock is the time of the member that had the
last one. A member that begins to wait is set forward to the clock: it saves nothing while it is idle, and keeps what it
owes, up to MAX_DEBT. So a member alone gets everything, one that asks for little is next at once, and members that
always wait get work in proportion to their weights.

Pure state machines: no clock of their own, no asyncio.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

MAX_DEBT = 16_384.0
"""Work above the clock that is remembered: what a member alone did must not cost it minutes once others come."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
_MANY = 1024
"""Members that are remembered while they do not wait; those that owe least are forgotten first."""


class Shares:
    """The members of one resource. Work is in units of the user's."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._times: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._waiting: dict[str, None] = {}

    def __len__(self) -> int:
        """Members that are remembered."""
        return len(self._times)

    @property
    def is_idle(self) -> bool:
        """Whether no member waits."""
        return not self._waiting

    def join(self, name: str, weight: float = 1.0) -> None:
        """The member waits for a turn. The last weight applies."""
        if name not in self._waiting:
            self._times[name] = max(self._clock, self._times.get(name, self._clock))
            self._waiting[name] = None
        self._weights[name] = weight

    def leave(self, name: str) -> None:
        """The member no longer waits."""
        self._waiting.pop(name, None)
        if len(self._times) - len(self._waiting) > 2 * _MANY:
            self._forget_least()

    def next(self, blocked: Container[str] = ()) -> str | None:
        """The member whose turn it is, of those that are not blocked."""
        if len(self._waiting) == 1 and not blocked:
            return next(iter(self._waiting))
        names = (name for name in self._waiting if name not in blocked)
        return min(names, key=self._times.__getitem__, default=None)

    def turns(self, is_over: Callable[[str], bool]) -> Iterator[str]:
        """Members that wait now, one turn after the other, each until it `is_over`. Work charged meanwhile counts."""
        order = [(self._times[name], number, name) for number, name in enumerate(self._waiting)]
        heapq.heapify(order)
        while order:
            time, number, name = order[0]
            if is_over(name):
                heapq.heappop(order)
            elif time != self._times[name]:
                heapq.heapreplace(order, (self._times[name], number, name))
            else:
                yield name

    def take_turn(self, name: str, work: float) -> None:
        """The member has a turn, for so much work."""
        self._clock = max(self._clock, self._times[name])
        self.charge(name, max(work, 1.0))

    def charge(self, name: str, work: float) -> None:
        """Charge work to a member afterwards; negative for work that was not done."""
        before = self._times.get(name, self._clock)
        time = max(before + work / self.weight(name), min(before, self._clock))
        self._times[name] = min(time, self._clock + MAX_DEBT)

    def weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def forget_idle(self) -> None:
        """Forget the members that do not wait, and what they owe."""
        self._keep(set(self._waiting))

    def _forget_least(self) -> None:
        idle = sorted((name for name in self._times if name not in self._waiting), key=self._times.__getitem__)
        self._keep({*self._waiting, *idle[-_MANY:]})

    def _keep(self, names: set[str]) -> None:
        self._times = {name: time for name, time in self._times.items() if name in names}
        self._weights = {name: weight for name, weight in self._weights.items() if name in names}


class _Place(NamedTuple, Generic[Item]):
    """Place of an item in its lane; places compare by priority, then by number."""

    priority: float
    """Lower ones leave first."""
    number: int
    item: Item
    work: float
    """Charged to the member when the item leaves."""


class Lane(Generic[Item]):
    """Waiting items of one member, which are hashable and different: by priority, then by arrival."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self._places: dict[Item, _Place[Item]] = {}
        self._order: list[_Place[Item]] = []
        """A heap of the same, and of items that were removed."""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, item: Item, work: float, priority: float = 0.0) -> None:
        self._add(_Place(priority, next(self._numbers), item, work))

    def put_back(self, item: Item, work: float) -> None:
        """Add an item as the first one."""
        self._add(_Place(-math.inf, -next(self._numbers), item, work))

    def first(self) -> tuple[Item, float]:
        """The first item and its work. Raises IndexError without one."""
        while self._places.get(self._order[0].item) is not self._order[0]:
            heapq.heappop(self._order)
        place = self._order[0]
        return place.item, place.work

    def work(self, item: Item) -> float:
        """The work of a waiting item."""
        return self._places[item].work

    def remove(self, item: Item) -> bool:
        """False where it does not wait."""
        if self._places.pop(item, None) is None:
            return False
        if not self._places:
            self._order.clear()
        return True

    def _add(self, place: _Place[Item]) -> None:
        self._places[place.item] = place
        heapq.heappush(self._order, place)


class Turns(Generic[Item]):
    """Items of several callers that wait for one resource. When nothing waits, what callers owe is forgotten."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._lanes: dict[str, Lane[Item]] = {}
        """By caller, of those that wait."""

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def push(self, caller: str, item: Item, work: float, priority: float = 0.0) -> None:
        """Add an item; the caller is charged when it leaves."""
        self._lane(caller).add(item, work, priority)

    def put_back(self, caller: str, item: Item, work: float) -> None:
        """Add an item that had left as the caller's first one; its earlier charge is refunded."""
        self._lane(caller).put_back(item, work)
        self._shares.charge(caller, -work)

    def first(self) -> tuple[Item, float]:
        """The next item and its work. Raises KeyError without one."""
        return self._lanes[self._next()].first()

    def pop(self) -> Item:
        """Take the next item. Raises KeyError without one."""
        caller = self._next()
        item, work = self._lanes[caller].first()
        self._shares.take_turn(caller, work)
        self.remove(caller, item)
        return item

    def remove(self, caller: str, item: Item) -> bool:
        """Remove a waiting item; False where it does not wait."""
        lane = self._lanes.get(caller)
        if lane is None or not lane.remove(item):
            return False
        if not len(lane):
            del self._lanes[caller]
            self._shares.leave(caller)
        if not self._lanes:
            self._shares.forget_idle()
        return True

    def charge(self, caller: str, work: float) -> None:
        """Charge a caller afterwards, for an item that has left."""
        self._shares.charge(caller, work)

    def _next(self) -> str:
        caller = self._shares.next()
        if caller is None:
            raise KeyError("nothing waits")
        return caller

    def _lane(self, caller: str) -> Lane[Item]:
        self._shares.join(caller)
        return self._lanes.setdefault(caller, Lane())


CPU_ROOM, DEVICE_ROOM = 16, 256
"""Sequences of one shard whose steps are short enough for a request that shares them: a device computes many rows in
hardly more time than a few, a processor does not.
"""
MAX_UNSTARTED_TOKENS = 2048
"""Prompt tokens of one caller that shards have not computed yet, beyond one request, where steps are to be short."""


def short_room(device: str) -> int:
    """The room of a shard on that device in which steps are short."""
    return CPU_ROOM if device.startswith("cpu") else DEVICE_ROOM


def fair_limits(asked: Mapping[str, int], weights: Mapping[str, float], room: int) -> dict[str, int]:
    """Max-min fair limits, at least 1, of those that ask for more than they get."""
    left, total = float(room), sum(weights.get(name, 1.0) for name in asked)
    by_need = sorted(asked, key=lambda name: asked[name] / weights.get(name, 1.0))
    for index, name in enumerate(by_need):
        weight = weights.get(name, 1.0)
        if asked[name] > max(1.0, left * weight / total):
            greedy = by_need[index:]
            return {other: max(1, int(left * weights.get(other, 1.0) / total)) for other in greedy}
        left -= asked[name]
        left, total = max(0.0, left), total - weight
    return {}


def limits_of(
    asked: Mapping[str, int], weights: Mapping[str, float], room: int, short: int
) -> tuple[dict[str, int], bool]:
    """How many sequences those callers may run that ask for more than they get, and whether that keeps steps short.

    Where all ask for more than their shares of the room in which steps are short, they share the whole room.
    """
    limits = fair_limits(asked, weights, min(room, short))
    is_short = len(limits) < len(asked)
    return (limits, True) if is_short else (fair_limits(asked, weights, room), False)
