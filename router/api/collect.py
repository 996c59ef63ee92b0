"""Waits for whole generations, alone or as a group that shares a prompt. Knows no HTTP."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from lorikeet.router.api.service import cancel_all
from lorikeet.router.errors import IncompleteGeneration
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import Chunk, FinishReason, Token

Alternatives = list[tuple[int, str, float]]


@dataclass
class Completed:
    """One generation from its first to its last token."""

    seed: int
    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = FinishReason.LENGTH
    num_cached: int = 0
    prefill: list[tuple[int, str, float | None]] = field(default_factory=list)
    prefill_alternatives: list[Alternatives] | None = None

    @property
    def num_skipped(self) -> int:
        """Tokens that cost no step of their own."""
        return sum(token.skipped for token in self.tokens)

    @property
    def mean_logprob(self) -> float:
        """What `best_of` compares."""
        return sum(token.logprob for token in self.tokens) / max(len(self.tokens), 1)


async def collect(generation: Generation) -> Completed:
    """Everything that `generation` gives. Raises what it raises."""
    whole = Completed(seed=generation.request.seed)
    texts: list[str] = []
    while True:
        chunk = await generation.next()
        whole.tokens += chunk.tokens
        texts.append(chunk.text)
        if chunk.num_cached:
            whole.num_cached = chunk.num_cached
        if chunk.prefill is not None:
            whole.prefill += chunk.prefill
        if chunk.prefill_alternatives is not None:
            whole.prefill_alternatives = chunk.prefill_alternatives
        if chunk.finish_reason is not None:
            whole.finish_reason = chunk.finish_reason
            whole.text = "".join(texts)
            return whole


async def collect_all(generations: list[Generation]) -> list[Completed]:
    """All of them, in their order; when one fails the others are cancelled."""
    if len(generations) == 1:
        return [await collect(generations[0])]
    tasks = [asyncio.ensure_future(collect(generation)) for generation in generations]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        cancel_all(generations)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def interleave(generations: list[Generation]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """(index of the generation, chunk) as they come, until every generation has finished."""
    if len(generations) == 1:
        while True:
            chunk = await generations[0].next()
            yield 0, chunk
            if chunk.finish_reason is not None:
                return
    arrivals: asyncio.Queue[tuple[int, Chunk | BaseException]] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_send_loop(index, each, arrivals)) for index, each in enumerate(generations)]
    num_running = len(tasks)
    try:
        while num_running:
            index, arrival = await arrivals.get()
            if isinstance(arrival, BaseException):
                raise arrival
            yield index, arrival
            num_running -= arrival.finish_reason is not None
    finally:
        for task in tasks:
            task.cancel()


async def _send_loop(
    index: int, generation: Generation, arrivals: "asyncio.Queue[tuple[int, Chunk | BaseException]]"
) -> None:
    try:
        while True:
            chunk = await generation.next()
            arrivals.put_nowait((index, chunk))
            if chunk.finish_reason is not None:
                return
    except asyncio.CancelledError:
        arrivals.put_nowait((index, IncompleteGeneration()))
        raise
    except Exception as error:
        arrivals.put_nowait((index, error))
