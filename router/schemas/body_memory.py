"""A budget of bytes for all request bodies: what is read, decoded and parsed is counted before it is allocated.

A body that does not fit waits, and is rejected where nothing becomes free in time. One caller holds at most a quarter.
Large bodies leave an eighth free, of all and of each caller's share, so that small ones do not wait for them.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from lorikeet.proto.process import return_freed_memory
from lorikeet.router.errors import BodyMemoryFull, BodyTooDetailed

MAX_WAIT_S = 10.0
MAX_WAITING_PER_CALLER = 16
SMALL_BYTES = 64 * 1024
"""Up to this size a body may use the part of the memory that is kept free."""

SETTLED_BYTES = 256 * 1024
"""Up to this size a body is no longer counted once its request is validated."""


RETURNED_BYTES = 16 * 1024 * 1024
"""After this many bytes of large bodies are freed, the C library returns freed memory to the system."""
RETURN_AFTER_S = 5.0
"""Seconds until it does so, once for all that is freed meanwhile."""


class BodyMemory:
    """The budget of one router."""

    def __init__(self, max_bytes: int, max_wait_s: float | None = None) -> None:
        """A body waits for `max_wait_s` at most, MAX_WAIT_S by default."""
        self._max_bytes = max_bytes
        self._max_per_caller = max_bytes // 4
        self.max_per_body = _for_large(self._max_per_caller)
        """What one body and its values may take."""
        self._max_wait_s = MAX_WAIT_S if max_wait_s is None else max_wait_s
        self._used = 0
        self._used_by: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []
        self._num_freed = 0
        """Bytes of large bodies since freed memory was last returned."""
        self._returning: asyncio.TimerHandle | None = None

    @property
    def num_used(self) -> int:
        """Bytes in use."""
        return self._used

    @property
    def num_waiting(self) -> int:
        """Bodies that wait."""
        return len(self._waiting)

    def body(self, caller: str) -> "BodyCharge":
        """The charge of one body of `caller`, empty at first."""
        return BodyCharge(self, caller)

    async def take(self, charge: "BodyCharge", num_bytes: int) -> None:
        """Add to `charge`. Raises BodyMemoryFull, and BodyTooDetailed where it could never fit."""
        if charge.size + num_bytes > self.max_per_body:
            raise BodyTooDetailed(self.max_per_body)
        if self._fits(charge, num_bytes):
            self._add(charge, num_bytes)
            return
        if sum(each.charge.caller == charge.caller for each in self._waiting) >= MAX_WAITING_PER_CALLER:
            raise BodyMemoryFull()
        waiting = _Waiting(charge, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiting.granted
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self.give_back(charge, num_bytes)
            raise (BodyMemoryFull() if isinstance(error, TimeoutError) else error) from None

    def give_back(self, charge: "BodyCharge", num_bytes: int) -> None:
        """Reduce `charge`, and let others in."""
        if charge.size > SMALL_BYTES:
            self._freed(num_bytes)
        self._add(charge, -num_bytes)
        for waiting in list(self._waiting):
            if self._fits(waiting.charge, waiting.num_bytes):
                self._waiting.remove(waiting)
                self._add(waiting.charge, waiting.num_bytes)
                waiting.granted.set_result(None)

    def _freed(self, num_bytes: int) -> None:
        """Bodies arrive in pieces, which the C library would keep for ever where a piece in use lies behind them."""
        self._num_freed += num_bytes
        if self._num_freed >= RETURNED_BYTES and self._returning is None:
            self._returning = asyncio.get_running_loop().call_later(RETURN_AFTER_S, self._return)

    def _return(self) -> None:
        self._num_freed, self._returning = 0, None
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    def _fits(self, charge: "BodyCharge", num_bytes: int) -> bool:
        limit, share = self._max_bytes, self._max_per_caller
        if charge.size + num_bytes > SMALL_BYTES:
            limit, share = _for_large(limit), _for_large(share)
        return self._used + num_bytes <= limit and self._used_by[charge.caller] + num_bytes <= share

    def _add(self, charge: "BodyCharge", num_bytes: int) -> None:
        charge.size += num_bytes
        self._used += num_bytes
        self._used_by[charge.caller] += num_bytes
        if not self._used_by[charge.caller]:
            del self._used_by[charge.caller]


def _for_large(num_bytes: int) -> int:
    """The part of a limit that large bodies may use."""
    return num_bytes - num_bytes // 8


class BodyCharge:
    """What one body holds of the budget."""

    def __init__(self, memory: BodyMemory, caller: str) -> None:
        self.caller = caller
        self.size = 0
        """Bytes."""
        self.num_text = 0
        """Bytes of the body itself, without the cost of its values."""
        self._memory = memory

    async def resize(self, num_bytes: int) -> None:
        """Hold `num_bytes` from now on, waiting for them if need be. Raises what `BodyMemory.take` raises."""
        if num_bytes > self.size:
            await self._memory.take(self, num_bytes - self.size)
        else:
            self.shrink(num_bytes)

    def settle(self) -> None:
        """The request is validated: what is left of its body are texts, and not worth counting where it was short."""
        self.shrink(self.num_text if self.num_text > SETTLED_BYTES else 0)

    def shrink(self, num_bytes: int) -> None:
        """Hold at most `num_bytes`."""
        if num_bytes < self.size:
            self._memory.give_back(self, self.size - num_bytes)


@dataclass(eq=False)
class _Waiting:
    charge: BodyCharge
    num_bytes: int
    granted: "asyncio.Future[None]"
