"""Queues the routers' commands for the step loop: the gRPC thread puts them, the loop drains them every iteration."""

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from lorikeet.proto import shard_pb2 as pb
from lorikeet.shard.requests.request import Request
from lorikeet.shard.scheduler.adapter_slots import Content


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
    """A router has disconnected: its requests end."""

    epoch: int


@dataclass(frozen=True)
class Commands:
    """One validated message of a router. Applied in the order of the fields."""

    epoch: int
    submits: list[Request | Refusal] = field(default_factory=list)
    abort_ids: list[int] = field(default_factory=list)
    prefetches: list[str] = field(default_factory=list)
    """Digests of adapters that will be needed soon."""
    pins: list[tuple[str, bool]] = field(default_factory=list)
    """(digest, whether it is pinned)."""
    unloads: list[str] = field(default_factory=list)
    """Digests of adapters that are no longer needed."""
    watch_s: float = 0.0
    """For so long the router wants to know what steps compute."""


@dataclass(frozen=True)
class AdapterRead:
    """An adapter was read into host memory, or could not be read."""

    digest: str
    content: Content | None
    reason: str = ""


@dataclass(frozen=True)
class LearningAsked:
    """A router asks what is learned from traffic."""

    purge: bool
    """Whether all of it is deleted first."""
    answer: Future[pb.LearningReply] = field(default_factory=Future)


Item = StreamOpened | StreamEnded | Commands | AdapterRead | LearningAsked


class Inbox:
    """A queue between threads on which the reader may block."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._resumes_at: dict[int, float] = {}
        """When streams are read again that sent more requests than they have credit for, in time.monotonic()."""
        self._changed = threading.Event()

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._changed.set()

    @property
    def is_empty(self) -> bool:
        """Whether the reader has taken everything."""
        return not self._items

    def pause(self, epoch: int, seconds: float) -> None:
        """Read nothing more of a stream for so long."""
        self._resumes_at[epoch] = time.monotonic() + seconds

    def pause_of(self, epoch: int) -> float:
        """Seconds for which nothing more of a stream is read."""
        return self._resumes_at.get(epoch, 0.0) - time.monotonic()

    def forget(self, epoch: int) -> None:
        """The stream has ended."""
        self._resumes_at.pop(epoch, None)

    def wake(self) -> None:
        """Wake the reader although nothing was put."""
        self._changed.set()

    def wait(self, seconds: float | None = None) -> None:
        """Block until something was put or wake() was called since the last drain, `seconds` at most."""
        self._changed.wait(seconds)

    def drain(self) -> list[Item]:
        """All items, in order."""
        self._changed.clear()
        return [self._items.popleft() for _ in range(len(self._items))]
