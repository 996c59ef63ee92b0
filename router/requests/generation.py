"""One generation from its submission to its last token: shard outputs in, text chunks out; and what is known of it.

Detokenizes and matches stop strings as output arrives, so that a slow reader never delays the end of a request;
output that was not read yet is joined into one chunk. Its memory is limited: what clients have not read, and what is
kept until an answer is complete. Sizes are estimates of the objects, from their numbers.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, Self

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import BY_VALUE, SOURCE_NAMES
from lorikeet.proto.grammars import ALL_EXCLUDED, TOO_SLOW
from lorikeet.router.errors import AnswerTooLarge, DeadlineExceeded, GenerationFailed, RouterError, ValidationError
from lorikeet.router.requests.request import (
    Alternatives,
    FinishReason,
    GenerationRequest,
    OutputChunk,
    OutputToken,
    PromptScores,
    ResolvedAdapters,
    ShardOutput,
)
from lorikeet.router.text.stop import MARKS, AnswerFinder, OutputPart, StopMatcher, without_marks
from lorikeet.router.text.tokenizer import Tokenizer

ISOLATION_STEPS, ISOLATION_GROWTH = 4, 4
"""Steps that a suspect has to run alone, and the factor by which they grow with each further crash."""
MAX_ISOLATION_STEPS = 4096


@dataclass(slots=True)
class PoisonRequestTracker:
    """Finds a request that crashes shards: the steps of a suspect compute no other request, so a second crash in one of
    them identifies it. Covers all shards that the request ever ran on.
    """

    num_crashes: int = 0
    """Shards that crashed in a step that computed the request."""
    isolation_steps: int = 0
    """Steps that the request still has to run alone."""

    def suspect(self) -> None:
        """A shard crashed before it reported anything of the request."""
        self.isolation_steps = max(self.isolation_steps, ISOLATION_STEPS)

    def record_crash(self) -> bool:
        """A shard crashed in a step that computed the request. True where the request is the cause: it was computed
        alone, and this was not the first crash.
        """
        was_isolated = self.isolation_steps > 0
        self.num_crashes += 1
        self.isolation_steps = min(MAX_ISOLATION_STEPS, ISOLATION_STEPS * ISOLATION_GROWTH ** (self.num_crashes - 1))
        return was_isolated and self.num_crashes > 1

    def record_steps(self, num_steps: int) -> None:
        """Steps that computed the request succeeded."""
        self.isolation_steps = max(0, self.isolation_steps - num_steps)


@dataclass(slots=True)
class Routing:
    """The scheduling state of one request: the dispatcher and the link of its shard write it."""

    number: int
    """Unique in this process; the id on the wire is unique in its stream."""
    flow: str
    """The flow of the fair queue that its tokens are charged to; "" for the base model."""
    queued_at: float
    """time.monotonic(), like the times below."""
    sent_at: float | None = None
    """When it was first sent."""
    placed_at: float = 0.0
    """When it was last sent."""
    waited_s: float | None = None
    """In the queue, until it was first sent."""
    deadline: float | None = None
    """When it fails."""
    shard_address: str = ""
    """Address of the shard that the request runs on, or that completed it; "" while it is queued."""
    wire_id: int = -1
    """The request's id on that shard's stream."""
    has_output: bool = False
    """Whether that shard has sent any output of it."""
    num_retries: int = 0
    """How often it went back into the queue."""
    num_reloads: int = 0
    """How often its adapter was loaded again, because a shard could not read it."""
    last_error: str = ""
    """Why a shard returned it."""
    adapter_tier: str = ""
    """Where its adapter was when it was first sent: `slot` or `host` (memory) of that shard, `disk` or `source`; ""
    without one.
    """
    prefix_keys: tuple[int, ...] | None = None
    """Keys of the prompt's blocks, once computed."""
    poison_tracker: PoisonRequestTracker = field(default_factory=PoisonRequestTracker)

    @property
    def is_queued(self) -> bool:
        return not self.shard_address

    def place(self, shard_address: str, wire_id: int, now: float) -> None:
        """The request is sent to a shard."""
        self.shard_address, self.wire_id, self.has_output = shard_address, wire_id, False
        self.placed_at = now
        self.sent_at = now if self.sent_at is None else self.sent_at

    def requeue(self, *, is_retry: bool) -> None:
        """Forget the shard: it is gone or rejected the request, or another caller has the request's place."""
        self.shard_address, self.wire_id = "", -1
        self.num_retries += is_retry


def is_verified(source: int) -> bool:
    """Whether a token with this source is of a step that verified draft tokens."""
    return source in (pb.SOURCE_RESAMPLE, pb.SOURCE_BONUS) or source in BY_VALUE


@dataclass(slots=True)
class SpeculationStats:
    """Speculation counts of one request that may speculate, over all shards that it ran on."""

    num_drafted: int = 0
    """Draft tokens that were verified."""
    num_accepted: int = 0
    """Accepted draft tokens that are in the text."""
    sources: Counter[int] = field(default_factory=Counter)
    """Tokens of the text by their source."""
    steps: Counter[int] = field(default_factory=Counter)
    """Steps that verified draft tokens, by the number of those that are in the text."""
    draft_seconds: float = 0.0
    """Seconds of proposing in the steps that verified drafts of the request."""
    verify_seconds: float = 0.0
    """Seconds of the target's forward passes in these steps."""
    accept_seconds: float = 0.0
    """Seconds of sampling with acceptance in these steps."""

    def take(self, output: ShardOutput, num_kept: int) -> None:
        """Add an output whose first `num_kept` tokens are in the text."""
        self.sources.update(output.sources[:num_kept])
        if not output.num_drafted:
            return
        self.num_drafted += sum(output.num_drafted)
        self.num_accepted += num_emitted(output, num_kept)
        self.steps.update(_accepted_by_step(output, num_kept))
        self.draft_seconds += output.draft_seconds
        self.verify_seconds += output.verify_seconds
        self.accept_seconds += output.accept_seconds


def _accepted_by_step(output: ShardOutput, num_kept: int) -> Iterator[int]:
    """Accepted draft tokens of each step that verified some: all of its tokens but the model's own at its end."""
    num_tokens = 0
    for index, source in enumerate(output.sources[:num_kept]):
        num_tokens += 1
        if output.step_ends[index] or index + 1 == num_kept:
            if is_verified(source):
                yield num_tokens - (source not in BY_VALUE)
            num_tokens = 0


def num_emitted(output: ShardOutput, num_kept: int) -> int:
    """Accepted draft tokens among the first `num_kept` tokens of an output.

    Derived from the shard's count, because an accepted draft token that is the first output token has the source
    `prefill`.
    """
    return output.num_accepted - sum(source in BY_VALUE for source in output.sources[num_kept:])


MAX_STEPS = 1024
"""Maximum recorded steps of one period; the output of later steps is only counted."""


@dataclass(slots=True)
class StepEvent:
    """One message of a shard about the request: the output of a step, or of several while the stream was slow."""

    at: float
    """time.monotonic()."""
    number: int
    """Number of the last of these steps, on its shard."""
    num_tokens: int
    """Tokens that the request got."""
    sources: bytes
    """One byte per token, a Source; empty where nothing was drafted."""
    num_drafted: int
    num_accepted: int
    step_ms: int
    """Duration of the step; 0 where the shard did not say."""
    batch_tokens: int
    """Tokens that the step computed, of all its requests; 0 where the shard did not say."""
    num_running: int
    """Requests that ran on the shard."""


@dataclass(slots=True)
class Period:
    """A stay in one place."""

    name: str
    """adapter_load | queue | dispatch."""
    began_at: float
    """time.monotonic(), like `ended_at`."""
    fields: dict[str, str | int]
    ended_at: float | None = None
    """None while it lasts."""
    outcome: str = ""
    """Why it ended: a finish reason, `retried`, or an error's class; "" where the next period was the plan."""
    steps: list[StepEvent] = field(default_factory=list)
    num_left_out: int = 0
    """Steps beyond MAX_STEPS."""


class Timeline:
    """Timeline of one generation."""

    def __init__(self) -> None:
        self.periods: list[Period] = []

    def enter(self, name: str, **fields: str | int) -> None:
        """The next period begins, and the one before it ends."""
        self.leave("")
        self.periods.append(Period(name, time.monotonic(), fields))

    def dispatched(self, routing: Routing) -> None:
        """The request is sent to a shard."""
        tier = {"tier": routing.adapter_tier} if routing.adapter_tier else {}
        self.enter("dispatch", shard=routing.shard_address, attempt=routing.num_retries + 1, **tier)

    def leave(self, outcome: str) -> None:
        """The current period ends. Does nothing where none lasts."""
        if self.periods and self.periods[-1].ended_at is None:
            self.periods[-1].ended_at, self.periods[-1].outcome = time.monotonic(), outcome

    def step(self, output: pb.StepOutput, part: ShardOutput, num_tokens: int, now: float) -> None:
        """A message of the shard that the request is on, with `part` for the request."""
        period = self.periods[-1]
        if len(period.steps) >= MAX_STEPS:
            period.num_left_out += 1
            return
        load = output.load
        period.steps.append(
            StepEvent(
                at=now,
                number=output.step,
                num_tokens=num_tokens,
                sources=part.sources[:num_tokens],
                num_drafted=sum(part.num_drafted),
                num_accepted=part.num_accepted,
                step_ms=load.step_ms,
                batch_tokens=load.step_tokens,
                num_running=load.num_running,
            )
        )


TOKEN_BYTES, ALTERNATIVE_BYTES, SCORE_BYTES = 256, 160, 32
MAX_UNREAD_BYTES = 1 << 20
"""Output of one sequence that its reader has not taken: above it the sequence leaves its shard until it is read."""
LEAST_UNREAD_BYTES = 64 << 10
"""The same while all outputs together take more than half of MAX_BYTES."""
MAX_ANSWER_BYTES = 64 << 20
"""Output of one sequence that is kept until its answer is complete: above it the request fails."""
MAX_BYTES = 256 << 20
"""Outputs of all sequences: above it, a sequence with more than LEAST_KEPT_BYTES fails when it gets more."""
LEAST_KEPT_BYTES = 4 << 20
SMALL_BYTES = 16 << 10
"""Output of one sequence that is within every limit."""


class OutputMemory:
    """The memory of all outputs that one router holds."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def is_too_much_unread(self, num_bytes: int) -> bool:
        """Whether a sequence with so much unread output has to wait for its reader."""
        return num_bytes > (LEAST_UNREAD_BYTES if self.num_bytes > MAX_BYTES // 2 else MAX_UNREAD_BYTES)

    def failure(self, num_bytes: int) -> AnswerTooLarge | None:
        """Why a sequence that takes so much cannot go on."""
        if num_bytes > MAX_ANSWER_BYTES:
            return AnswerTooLarge(f"{MAX_ANSWER_BYTES >> 20} MiB")
        if self.num_bytes > MAX_BYTES and num_bytes > LEAST_KEPT_BYTES:
            return AnswerTooLarge(
                f"{LEAST_KEPT_BYTES >> 20} MiB while all answers together take more than {MAX_BYTES >> 20} MiB"
            )
        return None


class OutputCharge:
    """The part of one sequence."""

    def __init__(self, memory: OutputMemory) -> None:
        self._memory = memory
        self.num_unread = 0
        self._num_kept = 0
        self._is_released = False

    def arrived(self, num_tokens: int, num_alternatives: int, num_scores: int, num_pooled: int) -> None:
        """An output was taken: `num_scores` log probabilities and ranks of a prompt, `num_pooled` bytes of vectors."""
        num_bytes = TOKEN_BYTES * num_tokens + ALTERNATIVE_BYTES * num_alternatives
        num_bytes += SCORE_BYTES * num_scores + num_pooled
        if not self._is_released:
            self.num_unread += num_bytes
            self._memory.num_bytes += num_bytes

    def token_arrived(self) -> None:
        """As `arrived`, of one token without alternatives."""
        if not self._is_released:
            self.num_unread += TOKEN_BYTES
            self._memory.num_bytes += TOKEN_BYTES

    @property
    def is_too_much_unread(self) -> bool:
        """Whether the sequence has to wait for its reader."""
        return self._memory.is_too_much_unread(self.num_unread)

    def read(self) -> int:
        """The reader has taken everything; returns how much that was."""
        num_bytes, self.num_unread = self.num_unread, 0
        self._memory.num_bytes -= num_bytes
        return num_bytes

    @property
    def num_bytes(self) -> int:
        """Everything that it takes."""
        return self.num_unread + self._num_kept

    def keep(self, num_bytes: int) -> None:
        """What was read stays in memory until the request ends. Raises AnswerTooLarge."""
        if not self._is_released:
            self._num_kept += num_bytes
            self._memory.num_bytes += num_bytes
            if (failure := self.failure()) is not None:
                raise failure

    def failure(self) -> AnswerTooLarge | None:
        """Why the sequence cannot go on, if it cannot."""
        return self._memory.failure(self.num_bytes)

    def release(self) -> None:
        """The request is over."""
        self._memory.num_bytes -= self.num_bytes
        self.num_unread = self._num_kept = 0
        self._is_released = True


_FINISH = {pb.FINISH_LENGTH: FinishReason.LENGTH, pb.FINISH_EOS: FinishReason.EOS_TOKEN}


def _may_draft(request: GenerationRequest) -> bool:
    """Whether draft tokens can be proposed, before its adapter is known."""
    may_draft = request.speculation.is_possible(has_heads=bool(request.learning_tenant))
    return may_draft or (request.grammar is not None and request.grammar.proposes)


class TokenWriter(Protocol):
    """Writes tokens for the reader of one sequence, which is not woken for them. Requests know no connections: what
    writes to one is in `api/`.
    """

    def write(self, token_id: int, text: str, logprob: float) -> bool:
        """A further token, without alternatives. False, and nothing happened, if it cannot be written at once."""


class Generation:
    """The output stream of one request. Iterate, or call `next()` until a chunk has a finish reason."""

    on_read: "Callable[[], None] | None" = None
    """Called once when its reader takes output, where the sequence waits for that."""
    _waiter: "asyncio.Future[None] | None" = None
    _writer: TokenWriter | None = None
    """Takes tokens while the reader waits and has read everything."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        timeline: Timeline | None = None,
        on_cancel: "Callable[[Generation], None] | None" = None,
        memory: OutputMemory | None = None,
    ) -> None:
        """`on_cancel` removes it from where it waits or runs, after its reader has gone."""
        self.request = request
        self.timeline = timeline
        """Where it has been; None where it is not traced."""
        self.routing = Routing(number, "" if request.adapter is None else request.adapter.flow, time.monotonic())
        """Where it runs."""
        self.adapters = ResolvedAdapters(request)
        self.is_admitted = request.adapter is None and request.heads is None
        """Whether its adapter and heads are resolved."""
        self.digest = ""
        """Digest of the adapter's content once it is admitted; "" for the base model."""
        self.charged_to = self.routing.flow, request.caller, self.digest
        """The caller that its tokens are charged to."""
        self.emitted_ids: list[int] = []
        """All output tokens so far: enough to continue on another shard."""
        self.pooled = bytearray()
        """float32 values of a vector or of scores, little-endian, for a request with `pooling`."""
        self.num_skipped = 0
        """Output tokens beyond the first of their step."""
        self.num_cached = 0
        """Prompt tokens found in the prefix cache."""
        self.num_reasoning = 0
        """Tokens of the reasoning in its text, once a route has counted them."""
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.speculation_stats = SpeculationStats() if _may_draft(request) else None
        """None where no draft token can be proposed."""
        self.read_texts: list[str] | None = None
        """The texts that were read, where the operator logs them."""
        self.finish_reason: FinishReason | None = None
        """Why its text is complete; None while it is not, or after an error."""
        self.is_over = False
        self.timers: list[asyncio.TimerHandle] = []
        """Cancelled when it is over."""
        self.tokenizer, self._on_cancel = tokenizer, on_cancel
        self._choose_ids(request, tokenizer)
        self.stop_reason: int | str | None = None
        """The stop token or the stop string that ended the output."""
        self._detokenizer = tokenizer.detokenizer(request.prompt_ids)
        self._choose_stops(request, tokenizer)
        self._needs_outputs = bool(self._stop is not None or request.logprobs.alternatives or timeline is not None)
        """Whether more is to be found out of each token than its text."""
        self.charge = OutputCharge(memory or OutputMemory())
        self._tokens, self._text = list[OutputToken](), ""
        self._is_mid_step = False
        """Whether the step of the last token continues in the next message."""
        self._prefill = pb.RequestOutput() if request.logprobs.prefill else None
        """Collects the prompt's log probabilities; None when not requested, and once they are in a chunk."""
        self._error: RouterError | None = None
        self._is_exhausted = False

    def _choose_ids(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._special_ids = tokenizer.special_ids
        self._eos_ids = frozenset[int]() if request.ignore_eos else tokenizer.eos_ids
        self.end_ids = self._eos_ids.union(request.stop_token_ids)
        """Tokens that end the output."""
        hidden_ids = self._special_ids - request.shown_ids if request.skip_special_tokens else frozenset[int]()
        self._hidden_ids = hidden_ids if request.include_stop_token else hidden_ids | self.end_ids

    def _choose_stops(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._stop: StopMatcher | None = None
        self._answer: AnswerFinder | None = None
        self._marks: dict[int, str] = {}
        """What stands for hidden tokens that stop strings contain."""
        if not any(request.stop_strings):
            return
        names = {token_id: tokenizer.vocabulary.raw(token_id) for token_id in self._hidden_ids - self.end_ids}
        named = [
            token_id for token_id, name in names.items() if name and any(name in stop for stop in request.stop_strings)
        ]
        self._marks = dict(zip(sorted(named), MARKS, strict=False))
        marks = {names[token_id]: mark for token_id, mark in self._marks.items()}
        self._stop = StopMatcher(request.stop_strings, request.include_stop, marks)
        if request.reasoning is not None:
            self._answer = AnswerFinder(request.reasoning)

    # Reading

    async def next(self, writer: TokenWriter | None = None) -> OutputChunk:
        """Everything new since the last chunk, without the tokens that `writer` took meanwhile: those of steps without
        drafts, of which nothing but their text is to be found out. Raises the error that ended the request.
        """
        if self._is_exhausted:
            raise StopAsyncIteration
        while not self._tokens and self.finish_reason is None:
            self._is_exhausted = self._error is not None
            self._writer = writer if self.read_texts is None else None
            try:
                await self._wait()
            finally:
                self._writer = None
        chunk = OutputChunk(self._tokens, self._text, self.finish_reason, self.num_cached, stop_reason=self.stop_reason)
        if self._prefill is not None:
            count = self.request.logprobs.prefill_alternatives
            chunk.prefill = PromptScores(self.request.prompt_ids, self._prefill, count, self.tokenizer)
            self._prefill = None
        if self.read_texts is not None:
            self.read_texts.append(self._text)
        self._tokens, self._text = [], ""
        self._is_exhausted = self.finish_reason is not None
        chunk.num_bytes = self.charge.read()
        if (on_read := self.on_read) is not None:
            self.on_read = None
            on_read()
        return chunk

    @property
    def is_behind(self) -> bool:
        """Whether its reader takes so little that the sequence has to wait for it."""
        return bool(self._tokens) and self._waiter is None and self.charge.is_too_much_unread

    async def named(self) -> None:
        """Wait until adapter and heads are resolved. Raises the error that ended the request before."""
        while not self.is_admitted:
            await self._wait()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def admit(self) -> None:
        """Adapter and heads are resolved. Raises ValidationError where they lack what the request asks for."""
        self.adapters.check()
        if self.emitted_ids and self.digest != self.adapters.digest:
            raise GenerationFailed("the adapter has changed while the request ran, and its file is gone")
        self.digest = self.adapters.digest
        self.charged_to = self.routing.flow, self.request.caller, self.digest
        if self.adapters.can_speculate and self.speculation_stats is None:
            self.speculation_stats = SpeculationStats()
        self.is_admitted = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputChunk:
        return await self.next()

    def cancel(self) -> None:
        """Stop generating: the reader has gone. Does nothing when the request is over."""
        if not self.is_over:
            if self._on_cancel is not None:
                self._on_cancel(self)
            self.fail(GenerationFailed("the request was cancelled"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    # Writing

    def feed(self, output: ShardOutput, now: float) -> int:
        """Take a shard's output; return the number of its tokens that count. `is_over` after the last.

        The reader is not woken: call `wake` once no more output is at hand. Raises for an output that is malformed.
        """
        ids, sources = list(output.token_ids), output.sources
        if unknown := set(sources) - SOURCE_NAMES.keys():
            raise ValueError(f"{max(unknown)} is not a token source")
        if self._prefill is not None:
            if len(output.prefill_alternative_ids) != len(output.prefill_alternative_logprobs):
                raise ValueError("alternatives and their log probabilities differ in number")
            if len(output.prefill_ranks) not in (0, len(output.prefill_logprobs)):
                raise ValueError("ranks and log probabilities differ in number")
            self._prefill.prefill_logprobs.extend(output.prefill_logprobs)
            self._prefill.prefill_ranks.extend(output.prefill_ranks)
            self._prefill.prefill_alternative_ids.extend(output.prefill_alternative_ids)
            self._prefill.prefill_alternative_logprobs.extend(output.prefill_alternative_logprobs)
        if output.pooled:
            self.pooled += output.pooled
            self.first_token_at, self.num_cached = now, self.num_cached or output.num_cached_tokens
        if not self.emitted_ids and ids:
            self.first_token_at = now
            self.num_cached = output.num_cached_tokens
        num_tokens = self._take(ids, output) if ids else 0
        num_alternatives = len(output.alternative_ids) + len(output.prefill_alternative_ids)
        num_scores = len(output.prefill_logprobs) + len(output.prefill_ranks)
        self.charge.arrived(len(ids), num_alternatives, num_scores, len(output.pooled))
        if self.speculation_stats is not None:
            self.speculation_stats.take(output, num_tokens)
        if num_tokens:
            self.last_token_at = now
        if self.finish_reason is None and output.finish_reason:
            self._end(output.finish_reason, output.error)
        return num_tokens

    def feed_token(self, token_id: int, logprob: float, now: float) -> bool:
        """As `feed`, of a further token of a step without drafts. False, and nothing happened, if more than its text is
        to be found out; `feed` does that.
        """
        if self._needs_outputs or self._is_mid_step or not self.emitted_ids:
            return False
        text, writer = self._detokenizer.push(token_id), self._writer
        is_named = token_id in self._special_ids or token_id in self._hidden_ids
        if (
            writer is None
            or is_named
            or self._tokens
            or self._detokenizer.num_earlier
            or not writer.write(token_id, text, logprob)
        ):
            self._keep_token(token_id, text, logprob)
        self.emitted_ids.append(token_id)
        if self.speculation_stats is not None:
            self.speculation_stats.sources[pb.SOURCE_TARGET] += 1
        self.last_token_at = now
        return True

    def _keep_token(self, token_id: int, text: str, logprob: float) -> None:
        """Keep a token of a step without drafts for the reader."""
        token = OutputToken(token_id, text, logprob, token_id in self._special_ids, False, pb.SOURCE_TARGET)
        token.num_earlier = self._detokenizer.num_earlier
        if token_id in self._hidden_ids:
            token.hidden = True
            text = text[: token.num_earlier]
        self._tokens.append(token)
        self._text += text
        self.charge.token_arrived()

    def fail(self, error: RouterError) -> None:
        """End with an error, which is raised after the chunks that were not read yet."""
        if self.is_over:
            return
        self._error = error
        self._close()
        self.wake()

    def requeue(self, *, is_retry: bool = True) -> None:
        """The shard is gone or rejected the request, or the request was taken back from it. The output so far is kept;
        the rest is computed elsewhere. `is_over` if the output is complete, and only the finish reason was lost.
        """
        self.routing.requeue(is_retry=is_retry)
        self._is_mid_step = False
        self.pooled.clear()
        if not self.emitted_ids:
            if self._prefill is not None:
                self._prefill.Clear()  # the next shard sends all of them again
        elif self.emitted_ids[-1] in self.end_ids:
            self._end(pb.FINISH_EOS, "")
        elif self.num_generated >= self.request.max_new_tokens:
            self._end(pb.FINISH_LENGTH, "")

    def reload(self) -> None:
        """Have the request's adapters resolved again, before another shard gets it."""
        self.adapters = ResolvedAdapters(self.request)
        self.is_admitted = False

    @property
    def num_generated(self) -> int:
        return len(self.emitted_ids)

    @property
    def known_ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.request.prompt_ids + self.emitted_ids

    @property
    def num_known(self) -> int:
        return len(self.request.prompt_ids) + len(self.emitted_ids)

    def _take(self, ids: list[int], output: ShardOutput) -> int:
        """Turn token ids into tokens with text; stop at the token that completes a stop string."""
        logprobs, sources, step_ends = output.logprobs, output.sources, output.step_ends
        num_alternatives = len(output.alternative_ids) // len(ids) if self.request.logprobs.alternatives else 0
        special_ids, hidden_ids, tokens, stop = self._special_ids, self._hidden_ids, self._tokens, self._stop
        detokenizer, skipped, marks = self._detokenizer, self._is_mid_step, self._marks
        num_unended = self.request.sampling.min_tokens - len(self.emitted_ids)
        for index, token_id in enumerate(ids):
            text = detokenizer.push(token_id)
            logprob = logprobs[index] if logprobs else 0.0
            source = sources[index] if sources else pb.SOURCE_TARGET
            token = OutputToken(token_id, text, logprob, token_id in special_ids, skipped, source)
            if num_alternatives:
                span = slice(index * num_alternatives, (index + 1) * num_alternatives)
                ids_there, logprobs_there = output.alternative_ids[span], output.alternative_logprobs[span]
                token.alternatives = Alternatives.of(ids_there, logprobs_there, self.tokenizer)
            tokens.append(token)
            self.num_skipped += skipped
            skipped = bool(step_ends) and not step_ends[index]
            token.num_earlier = detokenizer.num_earlier
            if token_id in hidden_ids:
                token.hidden = True
                text = text[: token.num_earlier] + marks.get(token_id, "")
            if stop is None:
                self._text += text
            elif text:
                num_beyond = self._push(stop, text, index >= num_unended)
                if stop.matched is not None:
                    if not token.hidden:
                        token.text = text[: max(0, len(text) - num_beyond)]
                    is_last = output.finish_reason == pb.FINISH_LENGTH and index + 1 == len(ids)
                    ids = ids[: index + 1]
                    self._end_at_stop(is_last)
                    break
        self._is_mid_step = skipped
        self.emitted_ids += ids
        return len(ids)

    def _push(self, stop: StopMatcher, text: str, may_end: bool, *, is_last: bool = False) -> int:
        """Search the answer in more text for stop strings. Returns the characters after the one that was found."""
        finder = self._answer
        parts = [(text, OutputPart.ANSWER)] if finder is None else finder.push(text)
        if finder is not None and is_last:
            parts.append(finder.flush())
        for at, (part, kind) in enumerate(parts):
            if kind is not OutputPart.ANSWER:
                self._text += stop.flush() + without_marks(part)
                continue
            self._text += stop.push(part, may_end)
            if stop.matched is not None:
                num_held = 0 if finder is None else len(finder.flush()[0])
                return stop.num_beyond + sum(len(later) for later, _ in parts[at + 1 :]) + num_held
        return 0

    def _end_at_stop(self, is_last: bool) -> None:
        # LoRAX tests the length first, and its text is the same either way; OpenAI's clients expect "stop".
        has_length = is_last and self.request.include_stop and not self.request.include_stop_token
        self.finish_reason = FinishReason.LENGTH if has_length else FinishReason.STOP_SEQUENCE
        self.stop_reason = None if has_length or self._stop is None else self._stop.matched
        self._close()

    def _end(self, finish: pb.FinishReason, error: str) -> None:
        """The shard has ended the request."""
        if finish in _FINISH:
            self._finish_text()
            if self._stop is not None and self._stop.matched is not None:
                self._end_at_stop(finish == pb.FINISH_LENGTH)
                return
            self.finish_reason = _FINISH[finish]
            last = self.emitted_ids[-1] if self.emitted_ids else -1
            if finish == pb.FINISH_EOS and last in self.end_ids - self._eos_ids:
                self.finish_reason, self.stop_reason = FinishReason.STOP_SEQUENCE, last
            self._close()
        elif finish == pb.FINISH_DEADLINE:
            self.fail(DeadlineExceeded())
        elif error == ALL_EXCLUDED and (masks := self.request.masks):
            names = " and ".join(f"`{name}`" for name in masks)
            self.fail(ValidationError(f"{names} exclude every token after {self.num_generated} tokens", masks[0]))
        elif error == TOO_SLOW:
            self.fail(ValidationError(f"after {self.num_generated} tokens, {error}"))
        else:
            self.fail(GenerationFailed(error or "the shard ended the request"))

    def _finish_text(self) -> None:
        tail = self._detokenizer.flush()
        if tail and self._tokens:
            self._tokens[-1].text += tail
        if self._stop is None:
            self._text += tail
            return
        self._push(self._stop, tail, may_end=True, is_last=True)
        if self._stop.matched is None:
            self._text += self._stop.flush()

    def _close(self) -> None:
        self.is_over = True
        if self.timeline is not None:
            self.timeline.leave(type(self._error).__name__ if self.finish_reason is None else self.finish_reason.value)
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    def wake(self) -> None:
        """Wake the reader, if it waits, and there is more than what was written for it."""
        if self._writer is not None:
            if not (self._tokens or self.is_over):
                return
            self._writer = None
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
