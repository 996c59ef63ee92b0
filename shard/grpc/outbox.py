"""What the steps gave, on its way to the routers. The loop never waits: what a slow stream has yet to take is merged.

Knows streams by their epoch and how to merge outputs; knows neither gRPC nor the wire's messages.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import add

from lorikeet.shard.scheduler.adapter_slots import Residency
from lorikeet.shard.scheduler.request import FinishReason
from lorikeet.shard.scheduler.speculation.types import Source

AdapterEvent = tuple[Residency, str]
"""Where an adapter is, and why it failed."""
NO_SECONDS = (0.0, 0.0, 0.0)
DRAFTED = (Source.LOOKUP, Source.MEDUSA, Source.DRAFT)
"""In this order drafts are counted, as on the wire."""
NO_UPDATE: Mapping[str, AdapterEvent] = {}


@dataclass(slots=True)
class Details:
    """What few requests ask for. Lists are flat, as on the wire."""

    alternative_ids: list[int] = field(default_factory=list)
    alternative_logprobs: list[float] = field(default_factory=list)
    prefill_logprobs: list[float] = field(default_factory=list)
    prefill_alternative_ids: list[int] = field(default_factory=list)
    prefill_alternative_logprobs: list[float] = field(default_factory=list)

    def merge(self, later: "Details") -> None:
        """Append what a later step gave."""
        self.alternative_ids += later.alternative_ids
        self.alternative_logprobs += later.alternative_logprobs
        self.prefill_logprobs += later.prefill_logprobs
        self.prefill_alternative_ids += later.prefill_alternative_ids
        self.prefill_alternative_logprobs += later.prefill_alternative_logprobs


@dataclass(slots=True)
class Output:
    """What one or several steps gave one request. One is made per token, so it is kept small."""

    key: tuple[int, int]
    token_ids: list[int] = field(default_factory=list)
    sources: bytes = b""
    step_ends: bytes = b""
    logprobs: list[float] = field(default_factory=list)
    details: Details | None = None
    num_cached: int = 0
    num_drafted: tuple[int, ...] = ()
    """Drafts verified, by DRAFTED; empty for none."""
    num_accepted: int = 0
    seconds: tuple[float, float, float] = NO_SECONDS
    """Proposing, verifying and accepting took, in the steps that verified drafts."""
    finish_reason: FinishReason = FinishReason.NONE
    error: str = ""
    retryable: bool = False
    in_step: bool = False
    """Whether a step that computed it failed."""

    def merge(self, later: "Output") -> None:
        """Append what a later step gave."""
        self.token_ids += later.token_ids
        self.sources += later.sources
        self.step_ends += later.step_ends
        self.logprobs += later.logprobs
        if self.details is None:
            self.details = later.details
        elif later.details is not None:
            self.details.merge(later.details)
        self.num_cached += later.num_cached
        if later.num_drafted:
            self._merge_drafts(later)
        self.finish_reason = later.finish_reason
        self.error = later.error
        self.retryable = later.retryable
        self.in_step = later.in_step

    def _merge_drafts(self, later: "Output") -> None:
        counts = self.num_drafted or (0,) * len(later.num_drafted)
        self.num_drafted = tuple(map(add, counts, later.num_drafted))
        self.num_accepted += later.num_accepted
        draft, verify, accept = map(add, self.seconds, later.seconds)
        self.seconds = draft, verify, accept


@dataclass(frozen=True)
class Status:
    """How the shard stands after a turn of its loop."""

    step: int = 0
    credit_requests: int = 0
    credit_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    num_preempted: int = 0
    """In this turn."""
    step_ms: int = 0
    step_tokens: int = 0
    expected_ms: int = 0
    """What the step at hand, or the next one, should take."""
    gap_us: int = 0
    """That the device has waited for the host between steps, since the start."""


@dataclass
class StreamUpdate:
    """What one stream is to be told next."""

    outputs: list[Output]
    status: Status
    num_preempted: int
    """Since the stream's last mail."""
    acknowledged: int
    adapters: dict[str, AdapterEvent]
    """By digest: where it is now, where that has changed."""
    step_requests: list[int] | None = None
    """Ids of the stream's requests that the step at hand computes, where that has changed."""


class StreamBuffer:
    """What waits for one stream."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.outputs: dict[int, Output] = {}
        self.status = Status()
        self.num_preempted = 0
        self.acknowledged = 0
        self.adapters: dict[str, AdapterEvent] = {}
        self.step_requests: list[int] | None = None
        self.is_announced = True
        """Whether the stream has sent the last word on what is computed."""
        self.is_called = False
        self.told: tuple[int, ...] | None = None

    def call(self) -> None:
        """Wake who takes, unless that was done."""
        if not self.is_called:
            self.is_called = True
            self.wake()

    @property
    def news(self) -> tuple[int, ...]:
        """What the router decides by; worth a message when it changes."""
        status = self.status
        return (status.credit_requests, status.credit_tokens, status.expected_ms, self.acknowledged)


class Outbox:
    """One tray per open stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = threading.Condition(self._lock)
        self._buffers: dict[int, StreamBuffer] = {}

    def open(self, epoch: int, wake: Callable[[], None]) -> None:
        """`wake` is called, from the step loop's thread, when there is something to take."""
        with self._lock:
            self._buffers[epoch] = StreamBuffer(wake)

    def close(self, epoch: int) -> None:
        with self._lock:
            self._buffers.pop(epoch, None)
            self._sent.notify_all()

    def announce_step(self, keys: Iterable[tuple[int, int]], wait_s: float = 0.0) -> None:
        """A step is about to compute these requests. Waits up to `wait_s` until every stream has sent that."""
        ids: dict[int, list[int]] = {}
        for epoch, request_id in keys:
            ids.setdefault(epoch, []).append(request_id)
        with self._lock:
            for epoch, buffer in self._buffers.items():
                buffer.step_requests, buffer.is_announced = ids.get(epoch, []), False
                buffer.call()
            if wait_s:
                self._sent.wait_for(lambda: all(buffer.is_announced for buffer in self._buffers.values()), wait_s)

    def sent(self, epoch: int, update: StreamUpdate) -> None:
        """A stream has sent what it took."""
        if update.step_requests is None:
            return
        with self._lock:
            buffer = self._buffers.get(epoch)
            if buffer is not None and buffer.step_requests is None:
                buffer.is_announced = True
                self._sent.notify_all()

    def publish(
        self,
        outputs: list[Output],
        status: Status,
        acknowledged: dict[int, int],
        adapters: Mapping[str, AdapterEvent] = NO_UPDATE,
    ) -> None:
        """Hand over what a turn gave. Outputs of streams that have ended are dropped."""
        with self._lock:
            for output in outputs:
                epoch, request_id = output.key
                buffer = self._buffers.get(epoch)
                if buffer is None:
                    continue
                earlier = buffer.outputs.setdefault(request_id, output)
                if earlier is not output:
                    earlier.merge(output)
            for epoch, buffer in self._buffers.items():
                buffer.status = status
                buffer.num_preempted += status.num_preempted
                buffer.acknowledged = acknowledged.get(epoch, 0)
                buffer.adapters.update(adapters)
                has_update = buffer.outputs or buffer.adapters or buffer.news != buffer.told
                if has_update:
                    buffer.call()

    def take(self, epoch: int) -> StreamUpdate:
        """All that waits for a stream."""
        with self._lock:
            buffer = self._buffers[epoch]
            update = StreamUpdate(
                list(buffer.outputs.values()),
                buffer.status,
                buffer.num_preempted,
                buffer.acknowledged,
                buffer.adapters,
                buffer.step_requests,
            )
            buffer.outputs = {}
            buffer.step_requests = None
            buffer.num_preempted = 0
            buffer.adapters = {}
            buffer.is_called = False
            buffer.told = buffer.news
            return update
