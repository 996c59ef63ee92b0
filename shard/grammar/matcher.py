"""The grammar of one request: where its output is in the grammar, and what may follow.

The matcher takes in committed tokens only. Draft tokens are looked at and never taken in, so nothing is ever rolled
back: its state is a function of the grammar and the output.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from llguidance import LLMatcher

from lorikeet.shard.requests.request import Unconstrained

log = structlog.get_logger()

T = TypeVar("T")

MAX_FORCED = 32
"""Most forced tokens that one step verifies."""
MAX_MISSED = 3
"""Proposed tokens that an output may differ from before the stricter grammar proposes no more for it."""
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


class GrammarMatcher(Unconstrained):
    """The constraint of one request."""

    is_constrained = True

    def __init__(
        self,
        compiling: Future[Compiled],
        proposes: bool,
        output_ids: Sequence[int] = (),
        submit: Callable[[Callable[[], None], None], Future[None]] | None = None,
        is_private: bool = False,
    ) -> None:
        """`output_ids` is the output of an earlier run, which `submit` lets a thread take in."""
        self.proposes = proposes
        self.eos_id = -1
        """The token that the grammar allows where its text is complete."""
        self._compiling = compiling
        self._output_ids, self._submit = output_ids, submit
        self._is_private = is_private
        self._starting: Future[None] | None = None
        self._matcher: LLMatcher | None = None
        self._forced: list[int] = []
        """Tokens that must or are likely to follow the committed ones, as far as they are known."""
        self._style: LLMatcher | None = None
        self._num_missed = 0

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return self._matcher is not None

    @property
    def may_be_shared(self) -> bool:  # type: ignore[override]
        return not self._is_private and self._compiling.done() and self._compiling.result().matcher is not None

    @property
    def matcher(self) -> LLMatcher:
        """Matcher of a request that is ready."""
        assert self._matcher is not None
        return self._matcher

    def start(self) -> bool:
        """Begin after the output of an earlier run. Returns whether that has ended; `error` says how."""
        if self._starting is not None:
            if self._starting.done() and self._matcher is None:
                self.error = self.error or "taking the output so far into the grammar takes too long"
            return self._starting.done()
        if not self._compiling.done():
            return False
        compiled = self._compiling.result()
        self.error, self.eos_id = compiled.error, compiled.eos_id
        if compiled.matcher is None:
            return True
        work = partial(self.checked, partial(self._start, compiled.matcher), None)
        if not self._output_ids or self._submit is None:
            work()
            return True
        self._starting = self._submit(work, None)
        return self.start()

    def _start(self, compiled: LLMatcher) -> None:
        matcher = compiled.deep_copy()
        if self._output_ids and not matcher.consume_tokens(list(self._output_ids)):
            self.error = f"the output so far does not match the grammar: {reason(matcher)}"
        self.is_complete = bool(matcher.is_stopped())
        style = self._compiling.result().style if self.proposes else None
        if style is not None:
            self._style = style.deep_copy()
            self._follow(self._output_ids)
        self._matcher = matcher

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Take tokens into the stricter grammar, which is dropped where the output leaves it."""
        if self._style is not None and token_ids and not self._style.consume_tokens(list(token_ids)):
            self._style = None

    def num_allowed(self, draft_ids: Sequence[int]) -> int:
        return self.checked(lambda: int(self.matcher.validate_tokens(list(draft_ids))), 0)

    def forced_ids(self) -> list[int]:
        compiled = self._compiling.result()
        if not self._forced and self.proposes and not compiled.is_slow:
            started = time.thread_time()
            self._forced = self.checked(lambda: list((self._style or self.matcher).compute_ff_tokens()), [])
            compiled.is_slow = time.thread_time() - started > MAX_FORCED_S
        return self._forced[:MAX_FORCED]

    def commit(self, token_id: int) -> bool:
        if self._forced and self._forced[0] != token_id:
            self._num_missed += 1
            self._style = self._style if self._num_missed < MAX_MISSED else None
        self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
        return self.checked(partial(self._consume, token_id), False)

    def _consume(self, token_id: int) -> bool:
        if not self.matcher.consume_token(token_id):
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
