"""A semaphore with a fixed number of slots, first come first served, and extra slots for urgent tickets."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Ticket:
    """One request for a slot."""

    on_fast: Callable[[], None] = lambda: None
    """Called when a ticket that already has a slot moves to an extra one."""
    is_urgent: bool = False
    is_inside: bool = False
    is_fast: bool = False
    """It has one of the extra slots for urgent tickets."""
    _opened: asyncio.Event = field(default_factory=asyncio.Event)


class Gate:
    """For one event loop."""

    def __init__(self, num_slots: int, num_fast: int) -> None:
        self._num_slots, self._num_fast = num_slots, num_fast
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
        ticket.is_inside = ticket.is_fast = False
        ticket._opened.clear()
        self._admit()

    def prioritize(self, ticket: Ticket) -> None:
        """Move a ticket ahead of those that are not urgent, even before it calls `enter`."""
        ticket.is_urgent = True
        if ticket in self._tickets:
            self._urgent[ticket] = None
            self._admit()

    def _admit(self) -> None:
        num_fast = sum(ticket.is_fast for ticket in self._urgent)
        for ticket in list(self._urgent):
            if num_fast >= self._num_fast:
                break
            if not ticket.is_fast:
                num_fast += 1
                ticket.is_fast = True
                if ticket.is_inside:
                    ticket.on_fast()
                else:
                    _open(ticket)
        num_free = self._num_slots - sum(ticket.is_inside and not ticket.is_fast for ticket in self._tickets)
        waiting = [*self._urgent, *(ticket for ticket in self._tickets if not ticket.is_urgent)]
        for ticket in [ticket for ticket in waiting if not ticket.is_inside][: max(0, num_free)]:
            _open(ticket)


def _open(ticket: Ticket) -> None:
    ticket.is_inside = True
    ticket._opened.set()
