"""One generation from its submission to its last token: shard outputs in, text chunks out.

Detokenizes and matches stop strings as output arrives, so that a slow reader never delays the end of a request;
output that was not read yet is joined into one chunk.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Self

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import SOURCE_NAMES
from lorikeet.proto.grammars import ALL_EXCLUDED
from lorikeet.router.errors import DeadlineExceeded, GenerationFailed, RouterError, ValidationError
from lorikeet.router.requests.adapter_content import ResolvedAdapters
from lorikeet.router.requests.routing import Routing
from lorikeet.router.requests.speculation_stats import SpeculationStats
from lorikeet.router.requests.timeline import Timeline
from lorikeet.router.requests.types import Chunk, FinishReason, GenerationRequest, Token
from lorikeet.router.text.reasoning import AnswerFinder, Part
from lorikeet.router.text.stop import MARKS, StopMatcher, without_marks
from lorikeet.router.text.tokenizer import Tokenizer

_FINISH = {pb.FINISH_LENGTH: FinishReason.LENGTH, pb.FINISH_EOS: FinishReason.EOS_TOKEN}


class Generation:
    """The output stream of one request. Iterate, or call `next()` until a chunk has a finish reason."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        timeline: Timeline | None = None,
        on_cancel: "Callable[[Generation], None] | None" = None,
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
        may_draft = request.speculation.is_possible(has_heads=bool(request.learning_tenant))
        may_draft = may_draft or (request.grammar is not None and request.grammar.proposes)
        self.speculation_stats = SpeculationStats() if may_draft else None
        """None where no draft token can be proposed."""
        self.read_texts: list[str] | None = None
        """The texts that were read, where the operator logs them."""
        self.finish_reason: FinishReason | None = None
        """Why its text is complete; None while it is not, or after an error."""
        self.is_over = False
        self.timers: list[asyncio.TimerHandle] = []
        """Cancelled when it is over."""
        self._tokenizer = tokenizer
        self._choose_ids(request, tokenizer)
        self.stop_reason: int | str | None = None
        """The stop token or the stop string that ended the output."""
        self._detokenizer = tokenizer.detokenizer(request.prompt_ids)
        self._choose_stops(request, tokenizer)
        self._on_cancel = on_cancel
        self._tokens: list[Token] = []
        self._text = ""
        self._is_mid_step = False
        """Whether the step of the last token continues in the next message."""
        self._prefill = pb.RequestOutput() if request.logprobs.prefill else None
        """Collects the prompt's log probabilities; None when not requested, and once they are in a chunk."""
        self._error: RouterError | None = None
        self._is_exhausted = False
        self._waiter: asyncio.Future[None] | None = None

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
        named = [each for each, name in names.items() if name and any(name in stop for stop in request.stop_strings)]
        self._marks = dict(zip(sorted(named), MARKS, strict=False))
        marks = {names[token_id]: mark for token_id, mark in self._marks.items()}
        self._stop = StopMatcher(request.stop_strings, request.include_stop, marks)
        if request.reasoning is not None:
            self._answer = AnswerFinder(request.reasoning)

    # Reading

    async def next(self) -> Chunk:
        """Everything new since the last chunk. Raises the error that ended the request."""
        if self._is_exhausted:
            raise StopAsyncIteration
        while not self._tokens and self.finish_reason is None:
            self._is_exhausted = self._error is not None
            await self._wait()
        chunk = Chunk(self._tokens, self._text, self.finish_reason, self.num_cached, stop_reason=self.stop_reason)
        if self._prefill is not None:
            self._add_prefill(chunk, self._prefill)
            self._prefill = None
        if self.read_texts is not None:
            self.read_texts.append(self._text)
        self._tokens, self._text = [], ""
        self._is_exhausted = self.finish_reason is not None
        return chunk

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
        if self.adapters.can_speculate and self.speculation_stats is None:
            self.speculation_stats = SpeculationStats()
        self.is_admitted = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
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

    def feed(self, output: pb.RequestOutput, now: float) -> int:
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
        if self.speculation_stats is not None:
            self.speculation_stats.take(output, num_tokens)
        if num_tokens:
            self.last_token_at = now
        if self.finish_reason is None and output.finish_reason:
            self._end(output.finish_reason, output.error)
        return num_tokens

    def fail(self, error: RouterError) -> None:
        """End with an error, which is raised after the chunks that were not read yet."""
        if self.is_over:
            return
        self._error = error
        self._close()
        self.wake()

    def requeue(self) -> None:
        """Its shard is gone or rejected it. Its output so far is kept; the rest is computed elsewhere. `is_over` where
        its output is complete, and only the finish reason was lost.
        """
        self.routing.requeue()
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
        """Its adapters are resolved again, before another shard gets it."""
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

    def _take(self, ids: list[int], output: pb.RequestOutput) -> int:
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
            token = Token(token_id, text, logprob, token_id in special_ids, skipped, source)
            if num_alternatives:
                span = slice(index * num_alternatives, (index + 1) * num_alternatives)
                token.alternatives = self._scored(output.alternative_ids[span], output.alternative_logprobs[span])
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
        parts = [(text, Part.ANSWER)] if finder is None else finder.push(text)
        if finder is not None and is_last:
            parts.append(finder.flush())
        for at, (part, kind) in enumerate(parts):
            if kind is not Part.ANSWER:
                self._text += stop.flush() + without_marks(part)
                continue
            self._text += stop.push(part, may_end)
            if stop.matched is not None:
                num_held = 0 if finder is None else len(finder.flush()[0])
                return stop.num_beyond + sum(len(later) for later, _ in parts[at + 1 :]) + num_held
        return 0

    def _scored(self, ids: Iterable[int], logprobs: Iterable[float]) -> list[tuple[int, str, float]]:
        text = self._tokenizer.token_text
        return [(token_id, text(token_id), logprob) for token_id, logprob in zip(ids, logprobs, strict=True)]

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

    def _add_prefill(self, chunk: Chunk, prefill: pb.RequestOutput) -> None:
        """Put the prompt's log probabilities into the first chunk."""
        text = self._tokenizer.token_text
        ids = self.request.prompt_ids
        values: list[float | None] = [None, *prefill.prefill_logprobs]
        chunk.prefill = [(token_id, text(token_id), value) for token_id, value in zip(ids, values, strict=False)]
        chunk.prefill_ranks = list(prefill.prefill_ranks) or None
        count = self.request.logprobs.prefill_alternatives
        if count:
            triples = self._scored(prefill.prefill_alternative_ids, prefill.prefill_alternative_logprobs)
            chunk.prefill_alternatives = [[], *(triples[at : at + count] for at in range(0, len(triples), count))]

    def _close(self) -> None:
        self.is_over = True
        if self.timeline is not None:
            self.timeline.leave(type(self._error).__name__ if self.finish_reason is None else self.finish_reason.value)
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    def wake(self) -> None:
        """Wake the reader, if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
