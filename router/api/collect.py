"""Collects whole generations, or interleaves the chunks of several; which tokens a text shows; sums of speculation."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import SOURCE_NAMES
from lorikeet.proto.params import ALL_HEADS
from lorikeet.router.api.prepare import cancel_all
from lorikeet.router.errors import IncompleteGeneration
from lorikeet.router.output.events import Message
from lorikeet.router.output.reader import Reader
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import FinishReason, OutputChunk, OutputToken


class VisibleTokens:
    """Finds the tokens of a choice that its text shows: no end-of-text token, nothing that a stop string cut off.

    The result does not depend on how the text is divided into chunks: a token is listed once text of it is shown.
    """

    def __init__(self, echo: str = "") -> None:
        self.echo = echo
        """The part of the prompt that is not shown yet."""
        self.prompt_ids: list[int] | None = None
        """The prompt's token ids, where asked for and not shown yet."""
        self._is_echoed = bool(echo)
        """Then special tokens are listed too, as the prompt's are: lm-eval expects one entry per output token."""
        self._offset = len(echo)
        """Characters of the text before the next token."""
        self._text_length = len(echo)
        self._waiting: deque[OutputToken] = deque()
        """Tokens whose text is not shown yet, because it may become a stop string."""

    def take(self, tokens: list[OutputToken], text: str, finish: FinishReason | None) -> list[tuple[OutputToken, int]]:
        """(token, offset of its text) of the tokens whose text `text` shows, after those of earlier chunks."""
        self._text_length += len(text)
        self._waiting.extend(tokens)
        shows_all = finish is not None and finish is not FinishReason.STOP_SEQUENCE
        shown = []
        while self._waiting:
            token = self._waiting[0]
            start = self._offset + token.num_earlier
            if not (token.hidden or shows_all or start < self._text_length):
                break
            self._waiting.popleft()
            if not token.hidden:
                shown.append((token, start))
                self._offset += len(token.text)
                continue
            if self._is_echoed:
                shown.append((token, start))
            self._offset = start
        return shown


Alternatives = list[tuple[int, str, float]]


@dataclass
class Completed:
    """One generation from its first to its last token."""

    seed: int
    tokens: list[OutputToken] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = FinishReason.LENGTH
    num_cached: int = 0
    prefill: list[tuple[int, str, float | None]] = field(default_factory=list)
    prefill_alternatives: list[Alternatives] | None = None
    prefill_ranks: list[int] | None = None
    """Ranks of the prompt tokens from the second on."""
    stop_reason: int | str | None = None
    message: Message = field(default_factory=Message)
    """The text as a message, in a conversation."""

    @property
    def num_skipped(self) -> int:
        """Tokens after the first of their step."""
        return sum(token.skipped for token in self.tokens)

    @property
    def mean_logprob(self) -> float:
        """What `best_of` compares."""
        return sum(token.logprob for token in self.tokens) / max(len(self.tokens), 1)


async def collect(generation: Generation) -> Completed:
    """Read `generation` to its end. Raises what it raises."""
    whole = Completed(seed=generation.request.sampling.seed)
    texts: list[str] = []
    while True:
        chunk = await generation.next()
        whole.tokens += chunk.tokens
        texts.append(chunk.text)
        if chunk.num_cached:
            whole.num_cached = chunk.num_cached
        whole.prefill_ranks = chunk.prefill_ranks or whole.prefill_ranks
        if chunk.prefill is not None:
            whole.prefill += chunk.prefill
        if chunk.prefill_alternatives is not None:
            whole.prefill_alternatives = chunk.prefill_alternatives
        if chunk.finish_reason is not None:
            whole.finish_reason, whole.stop_reason = chunk.finish_reason, chunk.stop_reason
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


async def read_all(readers: list[Reader], sequences: list[Completed]) -> None:
    """Read whole texts as messages."""

    async def read(reader: Reader, whole: Completed) -> None:
        whole.message.add(await reader.read(whole.text, whole.finish_reason, whole.stop_reason))

    await asyncio.gather(*map(read, readers, sequences))


async def interleave(generations: list[Generation]) -> AsyncGenerator[tuple[int, OutputChunk], None]:
    """(index of the generation, chunk) as they come, until every generation has finished."""
    if len(generations) == 1:
        while True:
            chunk = await generations[0].next()
            yield 0, chunk
            if chunk.finish_reason is not None:
                return
    arrivals: asyncio.Queue[tuple[int, OutputChunk | BaseException]] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_forward(index, each, arrivals)) for index, each in enumerate(generations)]
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


async def _forward(
    index: int, generation: Generation, arrivals: "asyncio.Queue[tuple[int, OutputChunk | BaseException]]"
) -> None:
    """Put each chunk, and a failure, into `arrivals`."""
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


def speculation_metrics(generation: Generation) -> dict[str, Any] | None:
    """vLLM's `metrics.speculative_decoding` of one sequence; None where no draft token of it was verified.

    An entry of the histogram counts the steps of which that many draft tokens were accepted.
    """
    stats = generation.speculation_stats
    if stats is None or not stats.num_drafted:
        return None
    num_steps, speculation = sum(stats.steps.values()), generation.request.speculation
    most = max(speculation.num_tokens, speculation.num_heads if speculation.num_heads < ALL_HEADS else 0, *stats.steps)
    return {
        "mean_acceptance_length": 1 + stats.num_accepted / max(num_steps, 1),
        "draft_acceptance_rate": stats.num_accepted / stats.num_drafted,
        "acceptance_histogram": [stats.steps[number] for number in range(most + 1)],
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
        "num_spec_steps": num_steps,
        "num_spec_tokens": most,
        "per_step_accepted": None,
        "per_step_drafted": None,
    }


def speculation_report(generations: Sequence[Generation]) -> dict[str, Any] | None:
    """`details.speculation` of the sequences of one request together; None where none of them could speculate.

    `steps` is the number of forwards that gave tokens, so `generated_tokens / steps` is the tokens per forward.
    """
    measured = [(each, each.speculation_stats) for each in generations if each.speculation_stats is not None]
    if not measured:
        return None
    speculation = generations[0].request.speculation
    stats = [stats for _, stats in measured]
    sources: Counter[int] = sum((each.sources for each in stats), Counter())
    return {
        "method": speculation.method,
        "verification": speculation.verify,
        "verify": speculation.verify,  # deprecated name
        "steps": sum(generation.num_generated - generation.num_skipped for generation, _ in measured),
        "drafted": sum(each.num_drafted for each in stats),
        "accepted": sum(each.num_accepted for each in stats),
        "resampled": sources[pb.SOURCE_RESAMPLE],
        "bonus": sources[pb.SOURCE_BONUS],
        "draft_seconds": round(sum(each.draft_seconds for each in stats), 6),
        "verify_seconds": round(sum(each.verify_seconds for each in stats), 6),
        "accept_seconds": round(sum(each.accept_seconds for each in stats), 6),
        "sources": {SOURCE_NAMES[source]: sources[source] for source in sorted(sources)},
    }
