"""What answers consist of: whole generations or their interleaved chunks, the tokens that a text shows, usage, counts
of speculation, and response headers (LoRAX's timings and counts, the adapter, names of ignored fields).

Values that a client chose are sanitized before they become headers.
"""

import asyncio
import contextlib
import re
import secrets
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from starlette.responses import Response

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import SOURCE_NAMES
from lorikeet.proto.params import ALL_HEADS
from lorikeet.router.api.prepare import Timing, cancel_all, now
from lorikeet.router.api.service import Service
from lorikeet.router.errors import IncompleteGeneration
from lorikeet.router.output.events import Message
from lorikeet.router.output.reader import Reader
from lorikeet.router.requests.generation import Generation, TokenWriter
from lorikeet.router.requests.request import FinishReason, OutputChunk, OutputToken, PromptScores
from lorikeet.router.schemas.model import MAX_IGNORED
from lorikeet.router.schemas.openai import OpenAIRequest

T = TypeVar("T")


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


@dataclass
class Completed:
    """One generation from its first to its last token."""

    seed: int
    tokens: list[OutputToken] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = FinishReason.LENGTH
    num_cached: int = 0
    prefill: PromptScores | None = None
    stop_reason: int | str | None = None
    message: Message = field(default_factory=Message)
    """The text as a message, in a conversation."""

    @property
    def num_skipped(self) -> int:
        """Tokens after the first of their step."""
        return sum(token.skipped for token in self.tokens)

    @property
    def num_entries(self) -> int:
        """Tokens and alternatives that an answer may list."""
        num_alternatives = sum(len(token.alternatives or ()) for token in self.tokens)
        return len(self.tokens) + num_alternatives + (0 if self.prefill is None else self.prefill.num_entries)

    @property
    def mean_logprob(self) -> float:
        """What `best_of` compares."""
        return sum(token.logprob for token in self.tokens) / max(len(self.tokens), 1)


async def collect(generation: Generation) -> Completed:
    """Read `generation` to its end. Raises what it raises, and AnswerTooLarge."""
    whole = Completed(seed=generation.request.sampling.seed)
    texts: list[str] = []
    while True:
        chunk = await generation.next()
        generation.charge.keep(chunk.num_bytes)
        whole.tokens += chunk.tokens
        texts.append(chunk.text)
        if chunk.num_cached:
            whole.num_cached = chunk.num_cached
        whole.prefill = chunk.prefill or whole.prefill
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


LARGE_ENTRIES = 1000
"""Tokens and alternatives that take a millisecond or two to write."""
ENTRY_CHARS = 3
"""Characters of a text that take as long to tokenize as one of them takes to write."""


async def written(service: Service, caller: str, num_entries: int, write: Callable[[], T]) -> T:
    """What `write` returns. Where it writes many tokens and alternatives, it runs in a thread in which callers take
    turns.
    """
    if num_entries <= LARGE_ENTRIES:
        return write()
    return await service.tokenizer.pool.run(write, caller, ENTRY_CHARS * num_entries)


async def read_all(readers: list[Reader], sequences: list[Completed]) -> None:
    """Read whole texts as messages."""

    async def read(reader: Reader, whole: Completed) -> None:
        whole.message.add(await reader.read(whole.text, whole.finish_reason, whole.stop_reason))

    await asyncio.gather(*map(read, readers, sequences))


async def interleave(
    generations: list[Generation], writer: TokenWriter | None = None
) -> AsyncGenerator[tuple[int, OutputChunk], None]:
    """(index of the generation, chunk) as they come, until every generation has finished. What `writer` takes of a
    single one is left out.
    """
    if len(generations) == 1:
        while True:
            chunk = await generations[0].next(writer)
            yield 0, chunk
            if chunk.finish_reason is not None:
                return
    # bounded, so that chunks that nobody reads stay with their generations, which count them
    arrivals: asyncio.Queue[tuple[int, OutputChunk | BaseException]] = asyncio.Queue(len(generations))
    tasks = [
        asyncio.ensure_future(_forward(index, generation, arrivals)) for index, generation in enumerate(generations)
    ]
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
            await arrivals.put((index, chunk))
            if chunk.finish_reason is not None:
                return
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.QueueFull):
            arrivals.put_nowait((index, IncompleteGeneration()))
        raise
    except Exception as error:
        await arrivals.put((index, error))


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
    measured = [
        (generation, generation.speculation_stats)
        for generation in generations
        if generation.speculation_stats is not None
    ]
    if not measured:
        return None
    speculation = generations[0].request.speculation
    stats = [stats for _, stats in measured]
    sources: Counter[int] = sum((counts.sources for counts in stats), Counter())
    return {
        "method": speculation.method,
        "verification": speculation.verify,
        "verify": speculation.verify,  # deprecated name
        "steps": sum(generation.num_generated - generation.num_skipped for generation, _ in measured),
        "drafted": sum(counts.num_drafted for counts in stats),
        "accepted": sum(counts.num_accepted for counts in stats),
        "resampled": sources[pb.SOURCE_RESAMPLE],
        "bonus": sources[pb.SOURCE_BONUS],
        "draft_seconds": round(sum(counts.draft_seconds for counts in stats), 6),
        "verify_seconds": round(sum(counts.verify_seconds for counts in stats), 6),
        "accept_seconds": round(sum(counts.accept_seconds for counts in stats), 6),
        "sources": {SOURCE_NAMES[source]: sources[source] for source in sorted(sources)},
    }


@dataclass(frozen=True)
class Envelope:
    """What an answer and all chunks of a stream have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    def around(
        self, choices: Sequence[dict[str, Any] | orjson.Fragment], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """LoRAX's order of keys."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **({} if usage is None else {"usage": usage}),
            "system_fingerprint": self.system_fingerprint,
        }


def token_counts(num_prompt: int, num_completion: int) -> dict[str, int]:
    """In LoRAX's order."""
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "total_tokens": total, "completion_tokens": num_completion}


async def count_reasoning(texts: Sequence[str], generations: Sequence[Generation]) -> int:
    """Tokens of the reasoning in all outputs, counted apart from the rest; notes those of each generation."""
    ids = await generations[0].tokenizer.encode_each(list(texts)) if any(texts) else []
    for generation, reasoning_ids in zip(generations, ids, strict=False):
        generation.num_reasoning = len(reasoning_ids)
    return sum(map(len, ids))


def usage(
    params: OpenAIRequest, num_prompt: int, generations: Sequence[Generation], num_reasoning: int = 0
) -> dict[str, Any]:
    """LoRAX's keys first, in its order; speculative decoding's counts are where OpenAI has those of predictions.

    `num_prompt` and `num_reasoning` are tokens of all prompts, and of the reasoning in all outputs.
    """
    num_completion = 0 if params.only_prompt else sum(generation.num_generated for generation in generations)
    num_cached = sum(generation.num_cached for generation in generations[:: params.best_of])
    counts: dict[str, Any] = token_counts(num_prompt, num_completion)
    counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    details: dict[str, Any] = {"reasoning_tokens": num_reasoning} if num_reasoning else {}
    report = speculation_report(generations)
    if report is not None:
        details |= {
            "accepted_prediction_tokens": report["accepted"],
            "rejected_prediction_tokens": report["drafted"] - report["accepted"],
            "speculation": report,
        }
    return counts | ({"completion_tokens_details": details} if details else {})


def metrics(generations: Sequence[Generation]) -> dict[str, Any]:
    """vLLM's `metrics`, of requests with one sequence."""
    report = speculation_metrics(generations[0]) if len(generations) == 1 else None
    return {} if report is None else {"metrics": {"speculative_decoding": report}}


def repeated(params: OpenAIRequest) -> dict[str, Any]:
    """What an answer repeats of the request."""
    report = params.report
    fields: dict[str, Any] = {} if report.service_tier is None else {"service_tier": "default"}
    return fields if report.metadata is None else fields | {"metadata": report.metadata}


_UNSAFE = re.compile(r"[^\x20-\x7e]")
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:-]")

_MAX_NAME = 64


def safe(value: str) -> str:
    """`value` with `?` for every character that a header must not hold."""
    return _UNSAFE.sub("?", value)


def request_id(client_id: str | None) -> str:
    """The client's id without characters that could break a header or a log line; a new id where nothing is left."""
    cleaned = _NOT_IN_ID.sub("", client_id or "")[:128]
    return cleaned or secrets.token_hex(16)


def ignored_fields(names: list[str]) -> dict[str, str]:
    """`x-ignored-fields`, absent when nothing was ignored."""
    if not names:
        return {}
    shown = [safe(name[:_MAX_NAME]).replace(",", "?") for name in names[:MAX_IGNORED]]
    return {"x-ignored-fields": ", ".join(shown)}


def _common_headers(service: Service, characters: int, generation: Generation | None) -> dict[str, str]:
    """LoRAX's `gpu+optimized` where there is a GPU, the model, and the adapter, if any."""
    info = service.dispatcher.info
    headers = {
        "x-compute-type": "cpu+optimized" if info is not None and info.device.startswith("cpu") else "gpu+optimized",
        "x-compute-characters": str(characters),
        "x-model-id": safe(service.config.model_name),
    }
    adapter = None if generation is None else generation.request.adapter
    if generation is None or adapter is None:
        return headers
    is_activated = generation.adapters.is_activated
    if is_activated is not None:
        headers["x-lorikeet-adapter-activated"] = str(is_activated).lower()
    return headers | {
        "x-adapter-id": safe(adapter.name),
        "x-adapter-source": adapter.source,
        "x-adapter-revision": safe(adapter.revision),
        "x-adapter-digest": generation.digest,
        "x-lorikeet-adapter-tier": service.tier(generation),
    }


@dataclass(frozen=True)
class Counts:
    """Counts shown in headers."""

    characters: int
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int


def stream_headers(service: Service, characters: int, generation: Generation | None) -> dict[str, str]:
    """Headers of a stream, known before its first token; `generation` is None for a request that failed."""
    return {"x-accel-buffering": "no", **_common_headers(service, characters, generation)}


def answer_headers(service: Service, timing: Timing, generation: Generation, counts: Counts) -> dict[str, str]:
    """Headers of a complete answer."""
    done_at = now()
    queued_at = timing.validated_at
    sent_at = generation.routing.sent_at or queued_at
    first_token_at = generation.first_token_at or done_at
    inference = done_at - sent_at
    first = first_token_at - sent_at
    total = _milliseconds(done_at - timing.arrived_at)
    return {
        **_common_headers(service, counts.characters, generation),
        "x-compute-time": total,
        "x-total-time": total,
        "x-prompt-tokens": str(counts.prompt_tokens),
        "x-generated-tokens": str(counts.generated_tokens),
        "x-skipped-tokens": str(counts.skipped_tokens),
        "x-total-tokens": str(counts.prompt_tokens + counts.generated_tokens),
        "x-validation-time": _milliseconds(timing.validated_at - timing.arrived_at),
        "x-queue-time": _milliseconds(sent_at - queued_at),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(counts.generated_tokens, 1)),
        "x-time-to-first-token": _milliseconds(first),
        "x-time-per-output-token": _milliseconds((inference - first) / max(counts.generated_tokens - 1, 1)),
    }


def _milliseconds(seconds: float) -> str:
    return str(max(0, int(seconds * 1000)))


def json_response(content: Any, headers: dict[str, str] | None = None) -> Response:
    """An answer of JSON, which may hold arrays of numpy."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), 200, headers, "application/json")
