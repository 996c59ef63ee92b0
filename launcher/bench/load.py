"""Sends planned requests: in a closed loop, or when they arrive, and notes what each saw."""

import asyncio
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import orjson

from lorikeet.launcher.bench.apis import Api, Seen
from lorikeet.launcher.bench.connection import ConnectionPool, Pieces, events
from lorikeet.launcher.bench.workload import Planned

TIER_HEADER = "x-lorikeet-adapter-tier"
"""Where the adapter was, in answers of Lorikeet."""


@dataclass
class Sample:
    """What one request saw; seconds count from when it was sent."""

    planned: Planned
    start: float
    """From the start of the load."""
    queue_time: float = 0.0
    """Seconds that it waited here for its turn, if the number of requests at a time is limited."""
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    """Between events with new tokens."""
    latency: float = 0.0
    """To the last token."""
    num_prompt: int = 0
    num_output: int = 0
    num_steps: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    tier: str = ""
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float:
        """Mean distance of output tokens after the first; 0 for one token."""
        return (self.latency - self.ttft) / (self.num_output - 1) if self.num_output > 1 else 0.0


@dataclass
class LoadResult:
    """Everything that a load has shown."""

    samples: list[Sample]
    """In the order of the plan."""
    duration: float
    client_cpu_s: float
    """Processor time of this process during the load."""


@dataclass
class _TimedResponse:
    """A complete response whose events are not parsed yet. `sent` is a time of time.perf_counter()."""

    sample: Sample
    sent: float
    pieces: Pieces = field(default_factory=list)


class LoadGenerator:
    """One run against one server.

    The events of an answer are parsed after the client has sent its next request: parsing first would delay and spread
    out the requests of clients whose answers end together.
    """

    def __init__(
        self, connections: ConnectionPool, api: Api, max_concurrency: int | None, *, shows_progress: bool = False
    ) -> None:
        self._connections = connections
        self._api = api
        self._max_concurrency = max_concurrency
        self._progress = _Progress(shows_progress)

    async def warm_up(self, planned: Sequence[Planned]) -> None:
        """Send these before the measurement. Raises ValueError if one fails: the command line is probably wrong."""
        answers = await asyncio.gather(*(self._ask(request, time.perf_counter(), 0.0) for request in planned))
        if errors := [sample.error for sample in map(self._read, answers) if sample.error]:
            raise ValueError(f"a request before the measurement failed: {errors[0]}")

    async def run(self, plan: Sequence[Planned]) -> LoadResult:
        """Send the whole plan. Failed requests are in the result, not raised."""
        self._progress.begin(len(plan))
        cpu_began, began = _cpu_seconds(), time.perf_counter()
        is_closed = self._max_concurrency is not None and all(request.at == 0 for request in plan)
        answers: asyncio.Queue[tuple[int, _TimedResponse]] = asyncio.Queue()
        reading = asyncio.create_task(self._read_all(answers, len(plan)))
        try:
            await (self._closed if is_closed else self._open)(plan, began, answers)
            duration = time.perf_counter() - began
            samples = await reading
        finally:
            reading.cancel()
        self._progress.end()
        return LoadResult(samples, duration, _cpu_seconds() - cpu_began)

    async def _closed(
        self, plan: Sequence[Planned], began: float, answers: "asyncio.Queue[tuple[int, _TimedResponse]]"
    ) -> None:
        """Each client sends the next request once its last answer is complete."""
        waiting: Iterator[tuple[int, Planned]] = iter(enumerate(plan))

        async def client() -> None:
            for index, planned in waiting:
                answers.put_nowait((index, await self._ask(planned, began, time.perf_counter() - began)))

        await asyncio.gather(*(client() for _ in range(min(self._max_concurrency or 1, len(plan)))))

    async def _open(
        self, plan: Sequence[Planned], began: float, answers: "asyncio.Queue[tuple[int, _TimedResponse]]"
    ) -> None:
        """Requests are sent when they arrive, or once there is room below the limit."""
        room = asyncio.Semaphore(self._max_concurrency or len(plan))

        async def send(index: int, planned: Planned) -> None:
            arrived = time.perf_counter()
            async with room:
                answer = await self._ask(planned, began, time.perf_counter() - arrived)
            answers.put_nowait((index, answer))

        running: list[asyncio.Task[None]] = []
        for index, planned in enumerate(sorted(plan, key=lambda request: request.at)):
            if (wait := began + planned.at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            running.append(asyncio.create_task(send(index, planned)))
        await asyncio.gather(*running)

    async def _read_all(self, answers: "asyncio.Queue[tuple[int, _TimedResponse]]", count: int) -> list[Sample]:
        """Parses one answer in each pass of the event loop, so that arrivals are noted and requests sent first."""
        samples: dict[int, Sample] = {}
        for _ in range(count):
            index, answer = await answers.get()
            samples[index] = self._read(answer)
            self._progress.add(samples[index])
            await asyncio.sleep(0)
        return [samples[index] for index in range(count)]

    async def _ask(self, planned: Planned, began: float, queue_time: float) -> _TimedResponse:
        content = orjson.dumps(self._api.body(planned))
        sent = time.perf_counter()
        answer = _TimedResponse(Sample(planned, sent - began, queue_time), sent)
        try:
            response = await self._connections.post(self._api.path, content)
            answer.sample.tier = response.headers.get(TIER_HEADER, "")
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.body[:300].decode(errors='replace')}")
            answer.pieces = response.pieces
        except (OSError, ValueError, TimeoutError) as error:
            answer.sample.error = str(error) or type(error).__name__
        return answer

    def _read(self, answer: _TimedResponse) -> Sample:
        sample = answer.sample
        if sample.error:
            return sample
        try:
            seen = Seen()
            for time_s, event in events(answer.pieces):
                self._api.read(event, time_s, seen)
            _fill(sample, seen, answer.sent)
        except (ValueError, KeyError, TypeError) as error:
            sample.error = str(error) or type(error).__name__
        return sample


def _fill(sample: Sample, seen: Seen, sent: float) -> None:
    """Raises ValueError for an answer that is not complete."""
    if seen.error:
        raise ValueError(seen.error)
    if not seen.is_complete or not seen.token_times:
        raise ValueError("the stream ended early" if seen.token_times else "the stream has no token")
    times = seen.token_times
    sample.ttft, sample.latency = times[0] - sent, times[-1] - sent
    sample.itls = [later - earlier for earlier, later in pairwise(times)]
    sample.num_prompt, sample.num_output = seen.num_prompt, seen.num_output or len(times)
    sample.num_steps, sample.sources, sample.text = seen.num_steps, seen.sources, "".join(seen.texts)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class _Progress:
    """One line on standard error: rewritten on a terminal, else one every ten seconds."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._is_terminal = sys.stderr.isatty()
        self._every = 0.5 if self._is_terminal else 10.0

    def begin(self, total: int) -> None:
        self._total, self._done, self._failed, self._tokens = total, 0, 0, 0
        self._began = self._shown_at = time.perf_counter()

    def add(self, sample: Sample) -> None:
        self._done += 1
        self._failed += bool(sample.error)
        self._tokens += sample.num_output
        now = time.perf_counter()
        if self._is_shown and now - self._shown_at >= self._every:
            self._shown_at = now
            self._show(now)

    def end(self) -> None:
        if self._is_shown:
            self._show(time.perf_counter())
            if self._is_terminal:
                print(file=sys.stderr)

    def _show(self, now: float) -> None:
        speed = self._tokens / max(now - self._began, 1e-9)
        remaining_s = (self._total - self._done) * (now - self._began) / self._done if self._done else math.inf
        counts = f"{self._done}/{self._total} requests, {self._failed} failed"
        text = f"{counts}, {speed:.0f} tokens/s, {remaining_s:.0f} s left"
        print(f"\r\033[K{text}" if self._is_terminal else text, end="" if self._is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()
