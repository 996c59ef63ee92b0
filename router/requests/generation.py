"""One generation from its submission to its last token: raw shard output in, text chunks out.

Detokenizes and looks for stop strings as output arrives, so that a slow reader never delays the end of a request;
what was not read yet is joined into one chunk. Knows the wire's RequestOutput and nothing of streams or queues.
"""

import asyncio
import time
from collections.abc import Callable
from enum import Enum, auto
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.errors import DeadlineExceeded, GenerationFailed, RouterError
from lorikeet.router.requests.adapter_content import ResolvedAdapters
from lorikeet.router.requests.adapter_ref import Adapter
from lorikeet.router.requests.crash_suspect import PoisonRequestTracker
from lorikeet.router.requests.speculation_stats import SpeculationStats
from lorikeet.router.requests.types import Chunk, FinishReason, GenerationRequest, Token
from lorikeet.router.text.stop import StopMatcher
from lorikeet.router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lorikeet.router.shards.connection import ShardLink

_LAST_SOURCE = max(pb.Source.values())
_FINISH = {pb.FINISH_LENGTH: FinishReason.LENGTH, pb.FINISH_EOS: FinishReason.EOS_TOKEN}


class State(Enum):
    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()


class Generation:
    """What a route holds of its request. Iterate, or call `next()` until a chunk has a finish reason."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        on_cancel: Callable[["Generation"], None],
        on_finish: Callable[["Generation"], None] = lambda generation: None,
    ) -> None:
        """`on_finish` is told when the text is complete, `on_cancel` when nobody waits for it any more."""
        self.number = number
        """Unique in this process; the id on the wire is the stream's own."""
        self.request = request
        self.seed = request.seed
        self.state = State.QUEUED
        self.queued_at = time.monotonic()
        self.sent_at: float | None = None
        self.waited_s: float | None = None
        """In the queue, until it was sent for the first time."""
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.num_generated = 0
        self.num_skipped = 0
        """Tokens beyond the first of their step."""
        self.num_cached = 0
        self.speculation_stats = SpeculationStats() if request.speculation.is_possible(has_heads=False) else None
        """What guessing ahead gave; None where nothing can be guessed."""
        self.read_texts: list[str] | None = None
        """What its reader got, where that is kept for the operator."""
        self.emitted_ids: list[int] = []
        """All tokens so far: enough to go on elsewhere."""
        self.is_heard = False
        """Whether the shard that it was sent to has given anything of it."""
        self.num_moves = 0
        """How often it went back into the queue."""
        self.prefix_keys: tuple[int, ...] | None = None
        """Of the beginnings of its prompt, once somebody asked."""
        self.poison_tracker: PoisonRequestTracker | None = None
        """Whether it may be what ended a shard."""
        self.deadline: float | None = None
        """time.monotonic() at which it ends with an error."""
        self.wire_id = -1
        self.link: ShardLink | None = None
        """The shard that it runs on."""
        self.digest = ""
        """Of the adapter's content, once it is known; empty for the base model."""
        self.contents = ResolvedAdapters(request)
        self.awaits: Adapter | None = None
        """Whose content it waits for."""
        self.is_admitted = request.adapter is None and request.heads is None
        """Whether all is known of its adapter and heads."""
        self.flow = "" if request.adapter is None else request.adapter.flow
        """The queue that its tokens are charged to."""
        self.timers: list[asyncio.TimerHandle] = []
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._hidden_ids = self._special_ids if request.ignore_eos else self._special_ids | tokenizer.eos_ids
        self._push = (detokenizer := tokenizer.detokenizer(request.prompt_ids)).push
        self._flush = detokenizer.flush
        self._stop = StopMatcher(request.stop_strings, request.include_stop) if any(request.stop_strings) else None
        self._on_cancel = on_cancel
        self._on_finish = on_finish
        self._tokens: list[Token] = []
        self.is_mid_step = False
        """Whether the step of the last token goes on in the next message."""
        self._text = ""
        self._wants_prefill = request.prefill_logprobs
        self._wants_alternatives = request.num_alternatives > 0
        self._prefill_logprobs: list[float] = []
        self._prefill_ids: list[int] = []
        self._prefill_values: list[float] = []
        self._finish: FinishReason | None = None
        self._error: RouterError | None = None
        self._exhausted = False
        self._waiter: asyncio.Future[None] | None = None

    # Reading

    async def next(self) -> Chunk:
        """Everything new since the last chunk. Raises what ended the request, unless that was its own end."""
        if self._exhausted:
            raise StopAsyncIteration
        while not self._tokens and self._finish is None:
            if self._error is not None:
                self._exhausted = True
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunk = Chunk(self._tokens, self._text, self._finish, self.num_cached)
        if self._wants_prefill:
            self._add_prefill(chunk)
        if self.read_texts is not None:
            self.read_texts.append(self._text)
        self._tokens, self._text = [], ""
        self._exhausted = self._finish is not None
        return chunk

    async def named(self) -> None:
        """Wait until it is known what adapter and heads hold. Raises what ended the request before that."""
        while not self.is_admitted:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def admit(self) -> None:
        """All is known of its adapter and heads. Raises ValidationError where that is not what was asked for."""
        self.contents.check()
        self.digest = self.contents.digest
        if self.contents.can_speculate and self.speculation_stats is None:
            self.speculation_stats = SpeculationStats()
        self.is_admitted = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        return await self.next()

    def cancel(self) -> None:
        """Nobody reads any more: leave the queue, or end in the shard. Harmless when already over."""
        if self.state is not State.DONE:
            self._on_cancel(self)
            self.fail(GenerationFailed("the request was cancelled"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    # Writing

    def feed(self, output: pb.RequestOutput, now: float) -> int:
        """Take what a step gave; return the number of tokens that count. `state` is DONE after the last.

        The reader is not told yet: `wake` does that, when no more output is at hand. Raises where it makes no sense.
        """
        ids, sources = list(output.token_ids), output.sources
        if sources and max(sources) > _LAST_SOURCE:
            raise ValueError(f"{max(sources)} is no source")
        self.is_heard = True
        if self.poison_tracker is not None:
            self.poison_tracker.stepped(sum(output.step_ends))
        if self._wants_prefill:
            if len(output.prefill_alternative_ids) != len(output.prefill_alternative_logprobs):
                raise ValueError("alternatives without log probabilities, or the other way round")
            self._prefill_logprobs.extend(output.prefill_logprobs)
            self._prefill_ids.extend(output.prefill_alternative_ids)
            self._prefill_values.extend(output.prefill_alternative_logprobs)
        if self.num_generated == 0 and ids:
            self.first_token_at = now
            self.num_cached = output.num_cached_tokens
        num_tokens = self._take(ids, output) if ids else 0
        if self.speculation_stats is not None:
            self.speculation_stats.take(output, num_tokens)
        if num_tokens:
            self.last_token_at = now
        finish = output.finish_reason
        if self._finish is None and finish:
            self._end(finish, output.error)
        if self._finish is not None:
            self._on_finish(self)
        return num_tokens

    def fail(self, error: RouterError) -> None:
        """End with an error; chunks that were not read yet come first."""
        if self.state is State.DONE:
            return
        self._error = error
        self._close()
        self.wake()

    def lost(self) -> None:
        """Its shard is gone, or refused it. What it got counts; what is missing is computed anew. `state` is DONE where
        nothing is: only the word that it has ended was lost.
        """
        self.state, self.link, self.wire_id, self.is_mid_step = State.QUEUED, None, -1, False
        self.num_moves += 1
        if not self.emitted_ids:  # scores of the prompt come whole or again
            self._prefill_logprobs.clear()
            self._prefill_ids.clear()
            self._prefill_values.clear()
        elif self.emitted_ids[-1] in self._tokenizer.eos_ids and not self.request.ignore_eos:
            self._end(pb.FINISH_EOS, "")
        elif self.num_generated >= self.request.max_new_tokens:
            self._end(pb.FINISH_LENGTH, "")
        if self._finish is not None:
            self._on_finish(self)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why its text is complete; None while it is not."""
        return self._finish

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended, if that was its own end."""
        return self._finish

    @property
    def is_over(self) -> bool:
        return self.state is State.DONE

    @property
    def known_ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.request.prompt_ids + self.emitted_ids

    @property
    def num_known(self) -> int:
        """How many these are."""
        return len(self.request.prompt_ids) + self.num_generated

    def _take(self, ids: list[int], output: pb.RequestOutput) -> int:
        """Turn token ids into tokens with text; stop at the token that completes a stop string."""
        logprobs = output.logprobs
        sources = output.sources
        step_ends = output.step_ends
        num_alternatives = len(output.alternative_ids) // len(ids) if self._wants_alternatives else 0
        special_ids, hidden_ids, tokens, stop = self._special_ids, self._hidden_ids, self._tokens, self._stop
        skipped = self.is_mid_step
        for index, token_id in enumerate(ids):
            text = self._push(token_id)
            logprob = logprobs[index] if logprobs else 0.0
            source = sources[index] if sources else pb.SOURCE_TARGET
            token = Token(token_id, text, logprob, token_id in special_ids, skipped, source)
            if num_alternatives:
                token.alternatives = self._alternatives(output, index, num_alternatives)
            tokens.append(token)
            self.num_skipped += skipped
            skipped = bool(step_ends) and not step_ends[index]
            if token_id in hidden_ids:
                continue
            if stop is None:
                self._text += text
            elif text:
                self._text += stop.push(text)
                if stop.matched is not None:
                    token.text = text[: len(text) - stop.num_beyond]
                    ids = ids[: index + 1]
                    last = output.finish_reason == pb.FINISH_LENGTH and index + 1 == len(output.token_ids)
                    self._stopped(at_length=last)
                    break
        self.is_mid_step = skipped
        self.num_generated += len(ids)
        self.emitted_ids += ids
        return len(ids)

    def _alternatives(self, output: pb.RequestOutput, index: int, count: int) -> list[tuple[int, str, float]]:
        span = slice(index * count, (index + 1) * count)
        text = self._tokenizer.token_text
        values = zip(output.alternative_ids[span], output.alternative_logprobs[span], strict=True)
        return [(token_id, text(token_id), logprob) for token_id, logprob in values]

    def _stopped(self, at_length: bool) -> None:
        # LoRAX tests the length first, and its text is the same either way; OpenAI's clients expect "stop".
        keeps_length = at_length and self.request.include_stop
        self._finish = FinishReason.LENGTH if keeps_length else FinishReason.STOP_SEQUENCE
        self._close()

    def _end(self, finish: pb.FinishReason, error: str) -> None:
        """The shard's own word that nothing follows."""
        if finish in _FINISH:
            self._finish_text()
            self._finish = _FINISH[finish]
            self._close()
        elif finish == pb.FINISH_DEADLINE:
            self.fail(DeadlineExceeded())
        else:
            self.fail(GenerationFailed(error or "the shard ended the request"))

    def _finish_text(self) -> None:
        tail = self._flush()
        if tail:
            if self._tokens:
                self._tokens[-1].text += tail
            self._text += tail if self._stop is None else self._stop.push(tail)
        if self._stop is not None and self._stop.matched is None:
            self._text += self._stop.flush()

    def _add_prefill(self, chunk: Chunk) -> None:
        """Put the prompt's log probabilities into the first chunk."""
        text = self._tokenizer.token_text
        ids = self.request.prompt_ids
        values: list[float | None] = [None, *self._prefill_logprobs]
        chunk.prefill = [(token_id, text(token_id), value) for token_id, value in zip(ids, values, strict=False)]
        count = self.request.num_prefill_alternatives
        if count:
            triples = [
                (token_id, text(token_id), value)
                for token_id, value in zip(self._prefill_ids, self._prefill_values, strict=True)
            ]
            chunk.prefill_alternatives = [[], *(triples[at : at + count] for at in range(0, len(triples), count))]
        self._wants_prefill = False

    def _close(self) -> None:
        self.state = State.DONE
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    def wake(self) -> None:
        """Let the reader, if it waits, see what is new."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
