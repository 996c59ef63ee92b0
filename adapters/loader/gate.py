"""Lets so many pass at once, the urgent ones first, and one urgent one beside when all places are taken."""

import asyncio
from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Ticket:
    """One that wants to pass."""

    is_urgent: bool = False
    is_inside: bool = False
    _opened: asyncio.Event = field(default_factory=asyncio.Event)


class Gate:
    """Of one event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._waiting: deque[Ticket] = deque()
        self._inside: set[Ticket] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    async def enter(self, ticket: Ticket) -> None:
        """Wait for a place. A cancelled wait leaves nothing behind."""
        self._waiting.append(ticket)
        self._admit()
        try:
            await ticket._opened.wait()
        except asyncio.CancelledError:
            self.leave(ticket)
            raise

    def leave(self, ticket: Ticket) -> None:
        """Give the place to the next."""
        self._inside.discard(ticket)
        ticket.is_inside = False
        ticket._opened.clear()
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        self._admit()

    def hasten(self, ticket: Ticket) -> None:
        """Put one before those that are not urgent."""
        ticket.is_urgent = True
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            ticket = next((each for each in self._waiting if each.is_urgent), self._waiting[0])
            urgent_inside = sum(each.is_urgent for each in self._inside)
            is_full = len(self._inside) >= self._num_places
            if is_full and (not ticket.is_urgent or urgent_inside):
                return
            self._waiting.remove(ticket)
            self._inside.add(ticket)
            ticket.is_inside = True
            ticket._opened.set()
