"""A light load generator: streaming completions over HTTP/1.1 on plain asyncio streams, closed loop or Poisson
arrivals.

It shares the machine with the server, so it parses no event but the last.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PATH = "/v1/completions"


@dataclass(frozen=True)
class Target:
    """Where requests go, and the fields that this server needs in addition to OpenAI's."""

    port: int
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def request(self, prompt: str, num_tokens: int) -> bytes:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        content = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


@dataclass
class Answer:
    """What one request saw; times are of time.monotonic()."""

    sent: float
    events: list[float] = field(default_factory=list)
    """When each event with text arrived."""
    last: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    error: str = ""

    @property
    def first_token_s(self) -> float:
        return self.events[0] - self.sent

    @property
    def inter_token_s(self) -> float:
        """Mean distance of output tokens after the first."""
        return (self.events[-1] - self.events[0]) / max(1, self.num_output - 1)


@dataclass(frozen=True)
class Length:
    """Tokens in and out of every request, checked on every answer."""

    num_prompt: int = 256
    num_output: int = 64


async def complete(target: Target, prompt: str, length: Length, answer: Answer | None = None) -> Answer:
    """One streamed completion; a failure is in the answer, not raised. `answer` fills while it runs."""
    answer = Answer(sent=time.monotonic()) if answer is None else answer
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            writer.write(target.request(prompt, length.num_output))
            usage = await _read_events(reader, answer)
        finally:
            writer.close()
        answer.num_prompt, answer.num_output = usage["prompt_tokens"], usage["completion_tokens"]
        if (answer.num_prompt, answer.num_output) != (length.num_prompt, length.num_output):
            answer.error = f"{answer.num_prompt} tokens in, {answer.num_output} out"
    except (OSError, ValueError, KeyError, TypeError, IndexError, asyncio.IncompleteReadError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:500]
    answer.last = time.monotonic()
    return answer


async def closed_loop(target: Target, prompts: Sequence[str], clients: int, length: Length) -> list[Answer]:
    """`clients` clients, each sending the next prompt as soon as its last answer is complete."""
    waiting = iter(prompts)
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in waiting:
            answers.append(await complete(target, prompt, length))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def poisson(target: Target, prompts: Sequence[str], rate: float, length: Length, seed: int) -> list[Answer]:
    """Requests that arrive `rate` times a second on average, whatever the server does."""
    draw = random.Random(seed)
    start, offset = time.monotonic(), 0.0
    running: list[asyncio.Task[Answer]] = []
    for prompt in prompts:
        offset += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, start + offset - time.monotonic()))
        running.append(asyncio.create_task(complete(target, prompt, length)))
    return list(await asyncio.gather(*running))


async def until(is_so: Callable[[], bool]) -> None:
    """Look again and again, as seldom as is good enough for the start of a measurement."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Output tokens over the time from the first request sent to the last answer complete."""
    return sum(a.num_output for a in answers) / (max(a.last for a in answers) - min(a.sent for a in answers))


async def _read_events(reader: asyncio.StreamReader, answer: Answer) -> dict[str, int]:
    """Note when each event arrives; the usage that the last one reports."""
    status = (await reader.readline()).split(b" ", 2)[1]
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        chunked = chunked or line.lower().startswith(b"transfer-encoding: chunked")
    if status != b"200":
        raise ValueError(f"status {status.decode()}: {(await reader.read(2000)).decode(errors='replace')}")
    pending, last = b"", b""
    async for data in _bodies(reader, chunked):
        now = time.monotonic()
        *events, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith((b"data: {", b"data:{")):
                last = event
                answer.events.append(now)
    answer.events.pop()  # the last event carries usage, no text
    usage: dict[str, int] = json.loads(last[len(b"data:") :])["usage"]
    return usage


async def _bodies(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Pieces of the body as they arrive."""
    if not chunked:
        while data := await reader.read(65536):
            yield data
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
