"""Lets so many pass at once in the order they came, and a few that are urgent beside them.

Knows tickets; nothing of what is done inside.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


def _nothing() -> None:
    """For tickets that need not be told."""


@dataclass(eq=False)
class Ticket:
    """One that wants to pass."""

    on_fast: Callable[[], None] = _nothing
    """Called when one that is inside already becomes fast."""
    is_urgent: bool = False
    is_inside: bool = False
    is_fast: bool = False
    """Inside on one of the places for the urgent: to be done before everything else."""
    _opened: asyncio.Event = field(default_factory=asyncio.Event)


class Gate:
    """Of one event loop."""

    def __init__(self, num_places: int, num_fast: int) -> None:
        self._num_places = num_places
        self._num_fast = num_fast
        self._tickets: dict[Ticket, None] = {}
        """Inside and waiting, as they came."""
        self._urgent: dict[Ticket, None] = {}
        """Those of them that are urgent, as they became so."""

    @property
    def num_inside(self) -> int:
        return sum(ticket.is_inside for ticket in self._tickets)

    @property
    def num_waiting(self) -> int:
        return len(self._tickets) - self.num_inside

    async def enter(self, ticket: Ticket) -> None:
        """Wait for a place. A cancelled wait leaves nothing behind."""
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
        """Give the place to the next."""
        self._tickets.pop(ticket, None)
        self._urgent.pop(ticket, None)
        ticket.is_inside = ticket.is_fast = False
        ticket._opened.clear()
        self._admit()

    def hasten(self, ticket: Ticket) -> None:
        """Put one before those that are not urgent, wherever it is. It may not have come yet."""
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
                self._make_fast(ticket)
        num_free = self._num_places - sum(ticket.is_inside and not ticket.is_fast for ticket in self._tickets)
        waiting = [*self._urgent, *(ticket for ticket in self._tickets if not ticket.is_urgent)]
        for ticket in [ticket for ticket in waiting if not ticket.is_inside][: max(0, num_free)]:
            _open(ticket)

    def _make_fast(self, ticket: Ticket) -> None:
        ticket.is_fast = True
        if ticket.is_inside:
            ticket.on_fast()
        else:
            _open(ticket)


def _open(ticket: Ticket) -> None:
    ticket.is_inside = True
    ticket._opened.set()
