"""The grammar of one request: where its output is in the grammar, and what may follow.

The matcher takes in committed tokens only. Draft tokens are looked at and never taken in, so nothing is ever rolled
back: its state is a function of the grammar and the output. Where that takes long, a thread does it between steps, and
the request ends once it has taken too long in all.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import structlog
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from lorikeet.proto.grammars import FREE_S, MAX_MATCHING_S, TOO_SLOW
from lorikeet.shard.grammar.unlocked import UnlockedConsumer
from lorikeet.shard.requests.request import Unconstrained

log = structlog.get_logger()

T = TypeVar("T")
Bitmask = np.ndarray[tuple[int, int], np.dtype[np.int32]]

MAX_FORCED = 32
"""Most forced tokens that one step verifies."""
MAX_MISSED = 3
"""Proposed tokens that an output may differ from before the stricter grammar proposes no more for it."""
APART_S = 0.002
"""Processor time of a token above which a thread takes in those that follow: several requests share a step."""
MAX_FORCED_S = 0.01
"""Processor time to compute forced tokens, above which a grammar proposes none: it would delay every request."""


@dataclass
class Compiled:
    """The result of a compilation."""

    matcher: LLMatcher | None
    """At the grammar's start; copied for every request."""
    eos_id: int = -1
    error: str = ""
    """Why the grammar cannot be used."""
    is_slow: bool = False
    """Whether forced tokens took too long to compute once."""
    style: LLMatcher | None = None
    """At the start of a stricter grammar, whose forced tokens are likely in this one."""


@dataclass(frozen=True)
class BackgroundMatching:
    """How a thread takes in tokens outside the step loop."""

    submit: Callable[[Callable[[], bool]], Future[bool]]
    """Lets a thread do something; False where that takes too long."""
    consumer: UnlockedConsumer


class GrammarMatcher(Unconstrained):
    """The constraint of one request."""

    is_constrained = True

    def __init__(
        self,
        compiling: Future[Compiled],
        proposes: bool,
        output_ids: Sequence[int] = (),
        background: BackgroundMatching | None = None,
        is_private: bool = False,
    ) -> None:
        """`output_ids` is the output of an earlier run."""
        self.proposes = proposes
        self.eos_id = -1
        """The token that the grammar allows where its text is complete."""
        self._compiling = compiling
        self._output_ids, self._background = output_ids, background
        self._is_private = is_private
        self._clock: Callable[[], float] = time.thread_time
        """Processor time of the calling thread, in seconds."""
        self._taking: Future[bool] | None = None
        """Tokens that a thread takes in."""
        self._untaken: list[int] = []
        """Newest tokens of a slow grammar, which a thread is yet to take in."""
        self._matcher: LLMatcher | None = None
        self._mask: np.ndarray[tuple[int], np.dtype[np.int32]] | None = None
        """[words]: which tokens may follow, where a thread has computed that."""
        self._slow_s = 0.0
        """Processor time of the tokens that took more than FREE_S, without that."""
        self._forced: list[int] = []
        """Tokens that must or are likely to follow the committed ones, as far as they are known."""
        self._style: LLMatcher | None = None
        self._num_missed = 0

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return self._matcher is not None and self._taking is None and not self._untaken

    @property
    def may_be_shared(self) -> bool:  # type: ignore[override]
        is_shared = not self._is_private and self.error != TOO_SLOW
        return is_shared and self._compiling.done() and self._compiling.result().matcher is not None

    @property
    def matcher(self) -> LLMatcher:
        """Matcher of a request that is ready."""
        assert self._matcher is not None
        return self._matcher

    def start(self) -> bool:
        if self._taking is not None:
            if not self._taking.done():
                return False
            if not self._taking.result():
                self.error = self.error or TOO_SLOW
            self._taking = None
            return True
        if self._untaken:
            token_ids, self._untaken = self._untaken, []
            return self._begin(partial(self._take, token_ids))
        if not self._compiling.done():
            return False
        compiled = self._compiling.result()
        self.error, self.eos_id = compiled.error, compiled.eos_id
        if compiled.matcher is None:
            return True
        work = partial(self._start, compiled.matcher)
        if self._output_ids and self._background is not None:
            return self._begin(work)
        self.checked(work, False)
        return True

    def _begin(self, work: Callable[[], bool]) -> bool:
        """Let a thread do it. Returns whether it is done."""
        assert self._background is not None
        self._taking = self._background.submit(partial(self.checked, work, False))
        return self.start()

    def _start(self, compiled: LLMatcher) -> bool:
        matcher = compiled.deep_copy()
        if self._output_ids and not matcher.consume_tokens(list(self._output_ids)):
            self.error = f"the output so far does not match the grammar: {reason(matcher)}"
        self.is_complete = bool(matcher.is_stopped())
        style = self._compiling.result().style if self.proposes else None
        if style is not None:
            self._style = style.deep_copy()
            self._follow(self._output_ids)
        self._matcher = matcher
        return True

    def _take(self, token_ids: Sequence[int]) -> bool:
        """Take in tokens, and compute which may follow. Runs in a thread."""
        assert self._background is not None
        consumer = self._background.consumer
        for token_id in token_ids:
            consume = partial(self._consume, token_id, consumer.consume)
            if self._timed(consume, consumer.processor_time) or self.error:
                return True
        self._mask = np.frombuffer(self._timed(self.matcher.compute_bitmask), dtype=np.int32)
        return True

    @property
    def has_mask(self) -> bool:
        """Whether a thread has computed which tokens may follow."""
        return self._mask is not None

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write which tokens may follow. bitmask: [rows, words]."""
        if self._mask is None:
            self._timed(lambda: fill_next_token_bitmask(self.matcher, bitmask, row))
        else:
            # the tokenizer may have more tokens than the model, or fewer
            mask, self._mask = self._mask[: bitmask.shape[1]], None
            bitmask[row, : len(mask)] = mask

    def _timed(self, work: Callable[[], T], clock: Callable[[], float] | None = None) -> T:
        """The result of work for one token. Sets `error` once too much was done."""
        clock = clock or self._clock
        began = clock()
        result = work()
        seconds = clock() - began
        if seconds > APART_S:
            self.is_slow = self._background is not None
        if seconds > FREE_S:
            self._slow_s += seconds - FREE_S
            if self._slow_s > MAX_MATCHING_S:
                self.error = TOO_SLOW
        return result

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Take tokens into the stricter grammar, which is dropped where the output leaves it."""
        if self._style is not None and token_ids and not self._style.consume_tokens(list(token_ids)):
            self._style = None

    def num_allowed(self, draft_ids: Sequence[int]) -> int:
        return self.checked(lambda: int(self.matcher.validate_tokens(list(draft_ids))), 0)

    def forced_ids(self) -> list[int]:
        compiled = self._compiling.result()
        if not self._forced and self.proposes and not (compiled.is_slow or self.is_slow):
            started = time.thread_time()
            self._forced = self.checked(lambda: list((self._style or self.matcher).compute_ff_tokens()), [])
            compiled.is_slow = time.thread_time() - started > MAX_FORCED_S
        return self._forced[:MAX_FORCED]

    def commit(self, token_id: int) -> bool:
        if self._forced and self._forced[0] != token_id:
            self._num_missed += 1
            self._style = self._style if self._num_missed < MAX_MISSED else None
        self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
        if self.is_slow or self._untaken:
            self._untaken.append(token_id)
            return False
        return self.checked(partial(self._timed, partial(self._consume, token_id)), False)

    def _consume(self, token_id: int, consume: Callable[[LLMatcher, int], bool] = LLMatcher.consume_token) -> bool:
        if not consume(self.matcher, token_id):
            self.error = f"the grammar cannot be continued: {reason(self.matcher)}"
            return False
        self._follow([token_id])
        self.is_complete = bool(self.matcher.is_stopped())
        return self.is_complete

    def checked(self, work: Callable[[], T], otherwise: T) -> T:
        """The result of `work`; `otherwise`, with `error` set, where the library fails: only this request ends."""
        try:
            return work()
        except BaseException as failure:
            raise_unless_library(failure)
            self.error = f"the grammar cannot be continued: {type(failure).__name__}"
            return otherwise


def raise_unless_library(failure: BaseException) -> None:
    """Log a failure of llguidance. Its panics are no subclass of Exception. Raises what ends the process."""
    if isinstance(failure, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise failure
    log.error("grammar_failed", error=f"{type(failure).__name__}: {str(failure)[:200]}")


def reason(matcher: LLMatcher) -> str:
    """The first line of the matcher's error, "" without one; the others are its whole state."""
    return (matcher.get_error().splitlines() or [""])[0]
