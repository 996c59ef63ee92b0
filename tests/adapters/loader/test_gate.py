"""The loader's gate: never more tickets inside than slots, urgent ones first, and none is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.adapters.loader.jobs import HALF_LIFE_S, MAX_SLOW, Gate, Ticket, Uses


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(main())


async def run_pending() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_urgent_ticket_gets_an_extra_slot_when_all_slots_are_taken() -> None:
    async def test() -> None:
        gate, calls = Gate(1, 1), []
        inside, waiting, urgent = Ticket(lambda: calls.append("in")), Ticket(), Ticket(lambda: calls.append("urgent"))
        tasks = [asyncio.create_task(gate.enter(ticket)) for ticket in (inside, waiting, urgent)]
        await run_pending()
        assert (inside.is_inside, waiting.is_inside, urgent.is_inside) == (True, False, False)
        gate.prioritize(urgent)
        await run_pending()
        assert urgent.is_inside and urgent.is_fast and not waiting.is_inside and calls == []
        gate.prioritize(inside)  # has to wait for the one fast place
        assert not inside.is_fast
        gate.leave(urgent)
        assert inside.is_fast and calls == ["in"]
        await run_pending()
        assert waiting.is_inside and not waiting.is_fast  # on the place that became free
        await asyncio.gather(*tasks)

    run(test)


def test_a_ticket_prioritized_before_it_enters_gets_an_extra_slot() -> None:
    async def test() -> None:
        gate, ticket = Gate(0, 1), Ticket()
        gate.prioritize(ticket)
        await gate.enter(ticket)
        assert ticket.is_fast and gate.num_inside == 1
        gate.leave(ticket)
        assert gate.num_inside == gate.num_waiting == 0

    run(test)


def test_an_owner_that_used_slots_for_long_waits_and_holds_few() -> None:
    async def test() -> None:
        now = [0.0]
        gate = Gate(4, 2, Uses(lambda: now[0]))
        hostile = [Ticket(owners=("key:bad", f"local:{number}")) for number in range(8)]
        tasks = [asyncio.create_task(gate.enter(ticket)) for ticket in hostile]
        await run_pending()
        assert sum(ticket.is_inside for ticket in hostile) == 4
        now[0] = 3.0
        for ticket in hostile[:4]:
            gate.leave(ticket)
            await run_pending()
        assert [ticket.is_inside for ticket in hostile] == [False] * 4 + [True] + [False] * 3
        for ticket in hostile[4:]:
            gate.prioritize(ticket)
        assert [ticket.is_fast for ticket in hostile[4:]] == [True, False, False, False]
        honest = [Ticket(owners=("key:good",)) for _ in range(5)]
        tasks += [asyncio.create_task(gate.enter(ticket)) for ticket in honest]
        await run_pending()
        assert [ticket.is_inside for ticket in honest] == [True] * 4 + [False]
        gate.share(hostile[7], ("key:good", "local:7"))
        gate.leave(hostile[4])
        await run_pending()
        assert hostile[7].is_inside and hostile[7].is_fast, "it is wanted by somebody else too"
        assert [ticket.is_inside for ticket in hostile[5:7]] == [True, False]
        gate.leave(hostile[5])
        assert hostile[6].is_inside
        for ticket in hostile[6], hostile[7], *honest:
            gate.leave(ticket)
        now[0] += 10 * HALF_LIFE_S
        tasks += [asyncio.create_task(gate.enter(ticket)) for ticket in hostile[:3]]
        await run_pending()
        assert all(ticket.is_inside for ticket in hostile[:3]), "use is forgotten"
        for task in tasks:
            task.cancel()

    run(test)


def test_a_slow_ticket_leaves_its_slot_and_may_get_an_extra_one() -> None:
    async def test() -> None:
        calls: list[str] = []
        gate, tickets = Gate(1, 1), [Ticket(lambda: calls.append("fast")) for _ in range(3 + MAX_SLOW)]
        tasks = [asyncio.create_task(gate.enter(ticket)) for ticket in tickets]
        for number in range(MAX_SLOW):
            await run_pending()
            assert gate.step_back(tickets[number]) and not gate.step_back(tickets[number])
            assert gate.num_inside == number + 2, "the next one has its slot"
        await run_pending()
        assert not gate.step_back(tickets[MAX_SLOW]), "no more at once"
        assert not gate.step_back(tickets[-1]), "it waits"
        gate.prioritize(tickets[0])
        assert tickets[0].is_fast and not tickets[0].is_slow and calls == ["fast"]
        assert not gate.step_back(tickets[0]) and gate.step_back(tickets[MAX_SLOW])
        for ticket in tickets:
            gate.leave(ticket)
        assert not any(ticket.is_slow for ticket in tickets)
        for task in tasks:
            task.cancel()

    run(test)


EVENTS = st.tuples(st.sampled_from("elhcs"), st.integers(0, 7))
"""Enter, leave, prioritize, cancel, step back; of the ticket of that number."""


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3), st.integers(0, 2), st.lists(st.tuples(st.sampled_from("elhcs"), st.integers(0, 7)), max_size=60)
)
def test_slots_and_order_hold_for_any_events(num_slots: int, num_fast: int, events: list[tuple[str, int]]) -> None:
    async def test() -> None:
        gate = Gate(num_slots, num_fast)
        tickets = [Ticket() for _ in range(8)]
        tasks: dict[int, asyncio.Task[Any]] = {}
        for event, number in events:
            ticket = tickets[number]
            if event == "e" and number not in tasks:
                tasks[number] = asyncio.create_task(gate.enter(ticket))
            elif event == "l" and number in tasks and ticket.is_inside:
                await tasks.pop(number)
                gate.leave(ticket)
            elif event == "h":
                gate.prioritize(ticket)
            elif event == "s":
                gate.step_back(ticket)
            elif event == "c" and number in tasks and not ticket.is_inside:
                tasks.pop(number).cancel()
            await run_pending()
            come = [tickets[task] for task in tasks]
            slow = [ticket for ticket in come if ticket.is_inside and not (ticket.is_fast or ticket.is_slow)]
            behind = [ticket for ticket in come if ticket.is_slow]
            fast = [ticket for ticket in come if ticket.is_fast]
            waiting = [ticket for ticket in come if not ticket.is_inside]
            assert len(behind) <= MAX_SLOW and len(slow) <= num_slots and len(fast) <= num_fast
            assert not waiting or len(slow) == num_slots
            assert len(fast) == min(num_fast, sum(ticket.is_urgent for ticket in come))
            assert (gate.num_inside, gate.num_waiting) == (len(slow) + len(behind) + len(fast), len(waiting))
            assert not any(ticket.is_inside for ticket in tickets if ticket not in come)
        for task in tasks.values():
            task.cancel()

    run(test)
