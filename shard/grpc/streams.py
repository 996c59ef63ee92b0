"""Between the thread of gRPC and the step loop: `Inbox` queues the routers' commands, which the loop drains every
iteration, and `Outbox` buffers the outputs of steps for the routers.

The step loop never waits: outputs that a slow stream has not taken yet are merged, and the stream ends where they take
more than MAX_UNSENT_BYTES. A stream is identified by its epoch.
`Outbox` depends neither on gRPC nor on the wire's messages.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from operator import add

import numpy as np
import numpy.typing as npt

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.shard.requests.request import FinishReason, Request, Source
from lorikeet.shard.scheduler.adapter_slots import Content, Residency

AdapterEvent = tuple[Residency, str]
"""Where an adapter is, and why it could not be loaded."""
NO_SECONDS = (0.0, 0.0, 0.0)
MAX_UNSENT_BYTES = 64 << 20
"""Outputs of one stream that it has not taken."""
OUTPUT_BYTES, TOKEN_BYTES, DETAIL_BYTES, COLUMNS_BYTES = 400, 80, 40, 400
"""What an output takes, and each of its tokens and details; and columns, without their arrays."""
TARGET, STEP_END = bytes([Source.TARGET]), b"\1"
"""`sources` and `step_ends` of a token that a step without drafts has sampled."""


@dataclass(slots=True)
class AdapterEvents:
    """What happened to adapters since the last message: the first field came before the second."""

    unloaded: dict[str, None] = field(default_factory=dict)
    """Digests of adapters that have left, even if they were requested again since; in order."""
    states: dict[str, AdapterEvent] = field(default_factory=dict)
    """New state by digest, of adapters whose state has changed."""

    def __bool__(self) -> bool:
        return bool(self.unloaded or self.states)

    def add(self, later: "AdapterEvents") -> None:
        """Merge what happened since."""
        self.unloaded.update(later.unloaded)
        self.states.update(later.states)


@dataclass(slots=True)
class Details:
    """Log probabilities that few requests ask for. Lists are flat, as on the wire."""

    alternative_ids: list[int] = field(default_factory=list)
    alternative_logprobs: list[float] = field(default_factory=list)
    prefill_logprobs: list[float] = field(default_factory=list)
    prefill_alternative_ids: list[int] = field(default_factory=list)
    prefill_alternative_logprobs: list[float] = field(default_factory=list)
    prefill_ranks: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return DETAIL_BYTES * sum(len(getattr(self, name)) for name in DETAILS)

    def merge(self, later: "Details") -> None:
        """Append those of a later step."""
        for name in DETAILS:
            getattr(self, name).extend(getattr(later, name))


DETAILS = tuple(field.name for field in fields(Details))


@dataclass(slots=True)
class Output:
    """One request's output of one or several steps. One is made per token, so it is kept small."""

    key: tuple[int, int]
    token_ids: list[int] = field(default_factory=list)
    sources: bytes = b""
    step_ends: bytes = b""
    logprobs: list[float] = field(default_factory=list)
    details: Details | None = None
    num_cached: int = 0
    num_drafted: tuple[int, ...] = ()
    """Drafts verified, in the order of the rows of lorikeet/proto/draft_sources.py; empty for none."""
    num_accepted: int = 0
    seconds: tuple[float, float, float] = NO_SECONDS
    """Time spent proposing, verifying and accepting, in the steps that verified drafts."""
    finish_reason: FinishReason = FinishReason.NONE
    error: str = ""
    retryable: bool = False
    in_step: bool = False
    """Whether a step that computed the request failed."""
    pooled: bytes = b""
    """A vector or scores: float32 values, little-endian."""

    @property
    def epoch(self) -> int:
        return self.key[0]

    @property
    def num_bytes(self) -> int:
        """An estimate of its memory."""
        details = 0 if self.details is None else self.details.num_bytes
        return OUTPUT_BYTES + TOKEN_BYTES * len(self.token_ids) + len(self.pooled) + details

    def merge(self, later: "Output") -> None:
        """Append the output of a later step."""
        self.token_ids += later.token_ids
        self.sources += later.sources
        self.step_ends += later.step_ends
        self.pooled += later.pooled
        self.logprobs += later.logprobs
        if self.details is None:
            self.details = later.details
        elif later.details is not None:
            self.details.merge(later.details)
        self.num_cached += later.num_cached
        if later.num_drafted:
            counts = self.num_drafted or (0,) * len(later.num_drafted)
            self.num_drafted = tuple(map(add, counts, later.num_drafted))
            self.num_accepted += later.num_accepted
            draft, verify, accept = map(add, self.seconds, later.seconds)
            self.seconds = draft, verify, accept
        self.finish_reason, self.error = later.finish_reason, later.error
        self.retryable, self.in_step = later.retryable, later.in_step


@dataclass(slots=True)
class ColumnDrafts:
    """What a step with drafts gave n requests."""

    num_tokens: npt.NDArray[np.int64]
    """[n] tokens of each."""
    sources: npt.NDArray[np.uint8]
    """[T] source of each token, request by request."""
    num_drafted: npt.NDArray[np.int64]
    """[n] drafts that were verified."""
    num_accepted: npt.NDArray[np.int64]
    """[n]."""
    draft_sources: npt.NDArray[np.uint8]
    """[n] what proposed the drafts, any without."""
    seconds: tuple[float, float, float]
    """As `Output.seconds`, for all of them."""


@dataclass(slots=True)
class TokenColumns:
    """One token of each of n requests of a stream, sampled by one step without drafts; or with `drafts`, T of them."""

    epoch: int
    ids: npt.NDArray[np.uint64]
    """[n] ids within the stream."""
    token_ids: npt.NDArray[np.int64]
    """[T], T = n without drafts."""
    logprobs: npt.NDArray[np.float32] | None = None
    """[T], if all of the requests want them."""
    alternative_ids: npt.NDArray[np.int64] | None = None
    """[T, k]."""
    alternative_logprobs: npt.NDArray[np.float32] | None = None
    drafts: ColumnDrafts | None = None

    @property
    def num_alternatives(self) -> int:
        """k."""
        return 0 if self.alternative_ids is None else self.alternative_ids.shape[1]

    @property
    def num_bytes(self) -> int:
        """An estimate of its memory."""
        num_bytes = COLUMNS_BYTES + 2 * self.ids.nbytes + 2 * self.token_ids.nbytes
        if self.alternative_ids is not None:
            num_bytes += 2 * self.alternative_ids.nbytes
        return num_bytes

    def outputs(self) -> Iterator[Output]:
        """The outputs, request by request."""
        drafts, first, token_ids = self.drafts, 0, self.token_ids.tolist()
        counts = [1] * len(self.ids) if drafts is None else drafts.num_tokens.tolist()
        for index, (request_id, count) in enumerate(zip(self.ids.tolist(), counts, strict=True)):
            span = slice(first, first + count)
            first += count
            output = Output((self.epoch, request_id), token_ids[span], TARGET, STEP_END)
            if drafts is not None:
                output.sources, output.step_ends = drafts.sources[span].tobytes(), bytes(count - 1) + STEP_END
                if num_drafted := int(drafts.num_drafted[index]):
                    own = int(drafts.draft_sources[index])
                    output.num_drafted = tuple(num_drafted * (source == own) for source in BY_VALUE)
                    output.num_accepted, output.seconds = int(drafts.num_accepted[index]), drafts.seconds
            if self.logprobs is not None:
                output.logprobs = self.logprobs[span].tolist()
            if self.alternative_ids is not None and self.alternative_logprobs is not None:
                ids, logprobs = self.alternative_ids[span], self.alternative_logprobs[span]
                output.details = Details(ids.ravel().tolist(), logprobs.ravel().tolist())
            yield output


@dataclass(frozen=True)
class Status:
    """State of the shard after an iteration of its loop."""

    step: int = 0
    credit_requests: int = 0
    credit_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    num_preempted: int = 0
    """In this iteration."""
    step_ms: int = 0
    step_tokens: int = 0
    expected_ms: int = 0
    """Estimated time of the running step, or of the next one."""
    gap_us: int = 0
    """Total time that the device has waited for the host between steps."""
    is_stalled: bool = False
    """No step runs, because every request waits for an adapter or a grammar."""
    learning: pb.LearningTotals | None = None
    """Totals of a shard that learns heads."""


@dataclass(frozen=True)
class StepDetail:
    """What one step computes of one stream's requests, as far as it fits."""

    computed: list[tuple[int, int, int]]
    """(id, known tokens, draft tokens)."""
    preempted_ids: list[int]


MAX_DETAILS = 256
"""Requests in a StepDetail."""


@dataclass
class StreamUpdate:
    """Everything that one stream sends next."""

    outputs: list[Output | TokenColumns] = field(default_factory=list)
    """In the order of steps."""
    status: Status = Status()
    num_preempted: int = 0
    """Since the stream's last update."""
    acknowledged: int = 0
    adapters: AdapterEvents = field(default_factory=AdapterEvents)
    step_requests: list[int] | None = None
    """Ids of the stream's requests in the running step, if these have changed."""

    step_detail: StepDetail | None = None
    """Details of a step since the last update, where the router asks for them."""

    def request_outputs(self) -> list[Output]:
        """All outputs, one per request; those of columns too."""
        by_id: dict[int, Output] = {}
        for part in self.outputs:
            for output in part.outputs() if isinstance(part, TokenColumns) else (part,):
                earlier = by_id.setdefault(output.key[1], output)
                if earlier is not output:
                    earlier.merge(output)
        return list(by_id.values())

    @property
    def routing_state(self) -> tuple[int, ...]:
        """What the router's decisions depend on; a change is worth a message."""
        status = self.status
        credit = status.credit_requests, status.credit_tokens, self.acknowledged
        return (*credit, status.expected_ms, status.is_stalled)


class StreamTooSlow(Exception):
    """The outputs that a stream has not taken were too many: they are gone."""


class StreamBuffer:
    """The update that one stream has not taken yet."""

    def __init__(self, wake: Callable[[], object], end: Callable[[], object]) -> None:
        self.wake, self.end = wake, end
        self.update = StreamUpdate()
        self.num_bytes = 0
        """Memory of the outputs of `update`."""
        self.outputs: dict[int, Output] = {}
        """Outputs of `update` after its last columns, by request id: further ones are merged into them."""
        self.is_announced = True
        """Whether the stream has sent the latest `step_requests`."""
        self.is_called = False
        self.last_sent: tuple[int, ...] | None = None

    def call(self) -> None:
        """Wake the stream, once until it takes its update."""
        if not self.is_called:
            self.is_called = True
            self.wake()

    def add(self, output: Output | TokenColumns) -> None:
        """Append an output, or merge it into the one that the stream has not taken yet."""
        self.num_bytes += output.num_bytes
        if isinstance(output, TokenColumns):
            self.update.outputs.append(output)
            self.outputs = {}
            return
        earlier = self.outputs.setdefault(output.key[1], output)
        if earlier is output:
            self.update.outputs.append(output)
        else:
            earlier.merge(output)


class Outbox:
    """One buffer per open stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = threading.Condition(self._lock)
        self._buffers: dict[int, StreamBuffer] = {}

    def open(self, epoch: int, wake: Callable[[], object], end: Callable[[], object] = lambda: None) -> None:
        """From the step loop's thread, `wake` is called when there is an update to take, and `end` when the stream is
        too slow: nothing more is buffered for it.
        """
        with self._lock:
            self._buffers[epoch] = StreamBuffer(wake, end)

    def close(self, epoch: int) -> None:
        with self._lock:
            self._buffers.pop(epoch, None)
            self._sent.notify_all()

    def announce_step(self, keys: Iterable[tuple[int, int]], wait_s: float = 0.0) -> None:
        """Announce the requests of the step that is about to run. Waits up to `wait_s` for all streams to send this."""
        ids: dict[int, list[int]] = {}
        for epoch, request_id in keys:
            ids.setdefault(epoch, []).append(request_id)
        with self._lock:
            for epoch, buffer in self._buffers.items():
                buffer.update.step_requests, buffer.is_announced = ids.get(epoch, []), False
                buffer.call()
            if wait_s:
                self._sent.wait_for(lambda: all(buffer.is_announced for buffer in self._buffers.values()), wait_s)

    def describe_step(self, epoch: int, detail: StepDetail) -> None:
        """What the step that is about to run computes; it is sent with the next update."""
        with self._lock:
            if (buffer := self._buffers.get(epoch)) is not None:
                buffer.update.step_detail = detail

    def sent(self, epoch: int, update: StreamUpdate) -> None:
        """A stream has sent an update that it took."""
        with self._lock:
            buffer = self._buffers.get(epoch)
            if update.step_requests is not None and buffer is not None and buffer.update.step_requests is None:
                buffer.is_announced = True
                self._sent.notify_all()

    def publish(
        self,
        outputs: Iterable[Output | TokenColumns],
        status: Status,
        acknowledged: dict[int, int],
        adapters: AdapterEvents | None = None,
        credits: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Buffer the results of an iteration. Outputs of streams that have ended are dropped.

        credits: requests and KV tokens of the streams that may start more than the status says.
        """
        with self._lock:
            for output in outputs:
                if output.epoch in self._buffers:
                    self._buffers[output.epoch].add(output)
            self._end_slow_streams()
            for epoch, buffer in self._buffers.items():
                update = buffer.update
                update.status = status
                if credits and epoch in credits:
                    requests, tokens = credits[epoch]
                    update.status = replace(status, credit_requests=requests, credit_tokens=tokens)
                update.num_preempted += status.num_preempted
                update.acknowledged = acknowledged.get(epoch, 0)
                if adapters is not None:
                    update.adapters.add(adapters)
                if update.outputs or update.adapters or update.routing_state != buffer.last_sent:
                    buffer.call()

    def _end_slow_streams(self) -> None:
        slow = [epoch for epoch, buffer in self._buffers.items() if buffer.num_bytes > MAX_UNSENT_BYTES]
        for epoch in slow:
            self._buffers.pop(epoch).end()
        if slow:
            self._sent.notify_all()

    def take(self, epoch: int) -> StreamUpdate:
        """Take everything that is buffered for a stream. Raises StreamTooSlow."""
        with self._lock:
            if (buffer := self._buffers.get(epoch)) is None:
                raise StreamTooSlow
            taken, buffer.num_bytes = buffer.update, 0
            buffer.update = StreamUpdate(status=taken.status, acknowledged=taken.acknowledged)
            buffer.outputs, buffer.is_called, buffer.last_sent = {}, False, taken.routing_state
            return taken


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

    def wait(self, seconds: float | None = None) -> bool:
        """Block until something was put or wake() was called since the last drain, `seconds` at most. Returns whether
        that was so.
        """
        return self._changed.wait(seconds)

    def drain(self) -> list[Item]:
        """All items, in order."""
        self._changed.clear()
        return [self._items.popleft() for _ in range(len(self._items))]
