"""Streaming completions, sent by the code of lorikeet-bench: one, a closed loop, or Poisson arrivals."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import orjson

from lorikeet.launcher.bench.load import Completions, ConnectionPool, LoadGenerator, Pieces, Sample, Seen, events
from lorikeet.launcher.bench.workload import Planned

TIMEOUT_S = 3600.0
_READER = Completions("", {}, ignores_eos=False)


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and the fields that this server needs in addition to OpenAI's."""

    port: int
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def api(self) -> Completions:
        """The API whose greedy requests are sent."""
        return Completions(self.model, {"temperature": 0, **self.extra}, ignores_eos=False)

    def connections(self) -> ConnectionPool:
        """To be closed."""
        return ConnectionPool(f"http://127.0.0.1:{self.port}", {}, TIMEOUT_S)


@dataclass
class TimedCompletion:
    """What one request saw; times are of time.perf_counter(), or seconds from the start of a loop."""

    sent: float = field(default_factory=time.perf_counter)
    pieces: Pieces = field(default_factory=list)
    """Pieces of the body, as they arrive."""
    times: list[float] = field(default_factory=list)
    """Arrival times of the events with text in them, once the answer is complete."""
    last: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    error: str = ""

    @property
    def events(self) -> list[float]:
        """When each event with text has arrived so far."""
        return self.times or _seen(self.pieces).token_times

    @property
    def first_token_s(self) -> float:
        return self.events[0] - self.sent

    @property
    def inter_token_s(self) -> float:
        """Mean distance of output tokens after the first."""
        return (self.events[-1] - self.events[0]) / max(1, self.num_output - 1)


@dataclass(frozen=True)
class RequestLength:
    """Tokens in and out of every request, checked on every answer."""

    num_prompt: int = 256
    num_output: int = 64

    def check(self, answer: TimedCompletion) -> None:
        """An answer with another number of tokens has an error."""
        if not answer.error and (answer.num_prompt, answer.num_output) != (self.num_prompt, self.num_output):
            answer.error = f"{answer.num_prompt} tokens in, {answer.num_output} out"


async def complete(
    target: Endpoint, prompt: str, length: RequestLength, answer: TimedCompletion | None = None
) -> TimedCompletion:
    """One streamed completion over a connection of its own; a failure is in the answer, not raised. `answer` fills
    while it runs.
    """
    answer = TimedCompletion() if answer is None else answer
    api, connections = target.api(), target.connections()
    try:
        content = orjson.dumps(api.body(Planned(prompt, length.num_output)))
        response = await connections.post(api.path, content, answer.pieces)
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.body[:2000].decode(errors='replace')}")
        seen = _seen(answer.pieces)
        answer.times, answer.error = seen.token_times, seen.error
        answer.num_prompt, answer.num_output = seen.num_prompt, seen.num_output
        length.check(answer)
    except (OSError, ValueError, KeyError, TypeError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:500]
    finally:
        await connections.close()
    answer.last = time.perf_counter()
    return answer


async def closed_loop(
    target: Endpoint, prompts: Sequence[str], clients: int, length: RequestLength
) -> list[TimedCompletion]:
    """`clients` clients, each sending the next prompt as soon as its last answer is complete."""
    return await _load(target, [Planned(prompt, length.num_output) for prompt in prompts], clients, length)


async def _load(
    target: Endpoint, plan: Sequence[Planned], clients: int | None, length: RequestLength
) -> list[TimedCompletion]:
    connections = target.connections()
    try:
        loaded = await LoadGenerator(connections, target.api(), clients).run(plan)
    finally:
        await connections.close()
    return [_answer(sample, length) for sample in loaded.samples]


def _answer(sample: Sample, length: RequestLength) -> TimedCompletion:
    times = list(accumulate(sample.itls, initial=sample.start + sample.ttft))
    answer = TimedCompletion(sample.start, times=times, last=sample.start + sample.latency, error=sample.error)
    answer.num_prompt, answer.num_output = sample.num_prompt, sample.num_output
    length.check(answer)
    return answer


async def until(is_so: Callable[[], bool]) -> None:
    """Look again and again, as seldom as is good enough for the start of a measurement."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def tokens_per_second(answers: Sequence[TimedCompletion]) -> float:
    """Output tokens over the time from the first request sent to the last answer complete."""
    return sum(a.num_output for a in answers) / (max(a.last for a in answers) - min(a.sent for a in answers))


def _seen(pieces: Pieces) -> Seen:
    seen = Seen()
    for time_s, event in events(pieces):
        _READER.read(event, time_s, seen)
    return seen
