"""How word from the routers reaches the step loop: put by the gRPC thread, drained once per turn. Knows no gRPC."""

import threading
from collections import deque
from dataclasses import dataclass, field

from lorikeet.shard.scheduler.adapter_slots import Content
from lorikeet.shard.scheduler.request import Request


@dataclass(frozen=True)
class Refusal:
    """A submitted request that cannot run, and why."""

    key: tuple[int, int]
    reason: str
    retryable: bool = False


@dataclass(frozen=True)
class StreamOpened:
    """A router has connected."""

    epoch: int


@dataclass(frozen=True)
class StreamEnded:
    """A router is gone: its requests end."""

    epoch: int


@dataclass(frozen=True)
class Commands:
    """One message of a router, checked and put into the shard's own words. Applied in the order of the fields."""

    epoch: int
    submits: list[Request | Refusal] = field(default_factory=list)
    abort_ids: list[int] = field(default_factory=list)
    prefetches: list[str] = field(default_factory=list)
    """Digests of adapters that will be needed soon."""
    pins: list[tuple[str, bool]] = field(default_factory=list)
    """(digest, whether it is to stay)."""
    unloads: list[str] = field(default_factory=list)
    """Digests of adapters that are not needed any more."""


@dataclass(frozen=True)
class AdapterRead:
    """An adapter has come into host memory, or will not come."""

    digest: str
    content: Content | None
    reason: str = ""


Item = StreamOpened | StreamEnded | Commands | AdapterRead


class Inbox:
    """A queue between threads that the reader may sleep on."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._changed = threading.Event()

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._changed.set()

    def wake(self) -> None:
        """Let the reader look around although nothing came."""
        self._changed.set()

    def wait(self, seconds: float | None = None) -> None:
        """Sleep until something was put, or wake() was called, since the last drain; or for so long."""
        self._changed.wait(seconds)

    def drain(self) -> list[Item]:
        """All that came, in order."""
        self._changed.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
