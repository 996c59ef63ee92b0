"""A semaphore with a fixed number of slots, and extra slots for urgent tickets; owners of tickets get fair turns.

The owners of a ticket are who asked and where the adapter comes from. An owner that used slots for long lately waits
behind others and holds few slots at once, so that adapters that take forever delay only their own kind.
"""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

HALF_LIFE_S = 30.0
"""Half-life of an owner's recorded use, in seconds."""
_SMALL_USE_S = 1.0
"""An owner with less recorded use is not limited."""
_MAX_OWNERS = 4096


@dataclass(eq=False)
class Ticket:
    """One request for a slot."""

    on_fast: Callable[[], None] = lambda: None
    """Called when a ticket that already has a slot moves to an extra one."""
    owners: tuple[str, ...] = ()
    is_urgent: bool = False
    is_inside: bool = False
    is_fast: bool = False
    """It has one of the extra slots for urgent tickets."""
    since: float = 0.0
    """When it got a slot."""
    _opened: asyncio.Event = field(default_factory=asyncio.Event)


class Uses:
    """How long owners have used slots, lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seconds: dict[str, tuple[float, float]] = {}
        """By owner, with the time at which it was that much; the last recorded one last."""

    def of(self, owner: str) -> float:
        """Seconds, halved every HALF_LIFE_S."""
        seconds, time_s = self._seconds.get(owner, (0.0, 0.0))
        return seconds * math.exp2((time_s - self.clock()) / HALF_LIFE_S)

    def add(self, owner: str, seconds: float) -> None:
        """Record the use of one slot."""
        self._seconds[owner] = (self.of(owner) + seconds, self.clock())
        self._seconds[owner] = self._seconds.pop(owner)
        if len(self._seconds) > _MAX_OWNERS:
            del self._seconds[next(iter(self._seconds))]


class Gate:
    """For one event loop."""

    def __init__(self, num_slots: int, num_fast: int, uses: Uses | None = None) -> None:
        self._num_slots, self._num_fast = num_slots, num_fast
        self._most_held = max(1, num_slots // 4)
        """Slots of an owner that used more than a little lately. The others stay free for other owners."""
        self._uses = Uses() if uses is None else uses
        self._tickets: dict[Ticket, None] = {}
        """With a slot and waiting, in order of arrival."""
        self._urgent: dict[Ticket, None] = {}
        """The urgent ones among them, in the order in which they became urgent."""

    @property
    def num_inside(self) -> int:
        return sum(ticket.is_inside for ticket in self._tickets)

    @property
    def num_waiting(self) -> int:
        return len(self._tickets) - self.num_inside

    async def enter(self, ticket: Ticket) -> None:
        """Wait for a slot. A cancelled wait has no effect."""
        self._tickets[ticket] = None
        if ticket.is_urgent:
            self._urgent[ticket] = None
        self._admit()
        try:
            await ticket._opened.wait()
        except asyncio.CancelledError:
            self.leave(ticket)
            raise

    def leave(self, ticket: Ticket) -> None:
        """Release the slot to the next ticket."""
        self._tickets.pop(ticket, None)
        self._urgent.pop(ticket, None)
        if ticket.is_inside:
            for owner in ticket.owners:
                self._uses.add(owner, self._uses.clock() - ticket.since)
        ticket.is_inside = ticket.is_fast = False
        ticket._opened.clear()
        self._admit()

    def prioritize(self, ticket: Ticket) -> None:
        """Move a ticket ahead of those that are not urgent, even before it calls `enter`."""
        ticket.is_urgent = True
        if ticket in self._tickets:
            self._urgent[ticket] = None
            self._admit()

    def share(self, ticket: Ticket, owners: tuple[str, ...]) -> None:
        """Others wait for the same: the ticket has the turn of those that used slots for less time."""
        use = self._use()
        if not ticket.is_inside and use(owners) < use(ticket.owners):
            ticket.owners = owners
            self._admit()

    def _admit(self) -> None:
        use = self._use()
        held = Counter(owner for ticket in self._inside() for owner in ticket.owners)

        def may_enter(ticket: Ticket) -> bool:
            return use(ticket.owners) <= _SMALL_USE_S or all(held[owner] < self._most_held for owner in ticket.owners)

        def give(num_free: int, tickets: Iterable[Ticket], is_fast: bool) -> None:
            for ticket in sorted(tickets, key=lambda waiting: use(waiting.owners)):
                if num_free <= 0:
                    return
                if ticket.is_inside or may_enter(ticket):
                    num_free -= 1
                    ticket.is_fast = is_fast
                    held.update(() if ticket.is_inside else ticket.owners)
                    self._open(ticket)

        num_fast = sum(ticket.is_fast for ticket in self._urgent)
        give(self._num_fast - num_fast, [ticket for ticket in self._urgent if not ticket.is_fast], is_fast=True)
        num_free = self._num_slots - sum(not ticket.is_fast for ticket in self._inside())
        waiting = [*self._urgent, *(ticket for ticket in self._tickets if not ticket.is_urgent)]
        give(num_free, [ticket for ticket in waiting if not ticket.is_inside], is_fast=False)

    def _inside(self) -> list[Ticket]:
        return [ticket for ticket in self._tickets if ticket.is_inside]

    def _use(self) -> Callable[[tuple[str, ...]], float]:
        """The largest use among owners, with that of the slots that they hold now."""
        now, held = self._uses.clock(), defaultdict[str, float](float)
        for ticket in self._inside():
            for owner in ticket.owners:
                held[owner] += now - ticket.since
        return lambda owners: max((self._uses.of(owner) + held.get(owner, 0.0) for owner in owners), default=0.0)

    def _open(self, ticket: Ticket) -> None:
        """Let it in, or tell it that it moved to an extra slot."""
        if ticket.is_inside:
            ticket.on_fast()
        else:
            ticket.is_inside, ticket.since = True, self._uses.clock()
            ticket._opened.set()
