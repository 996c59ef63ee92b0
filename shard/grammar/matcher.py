"""The grammar of one request: where its output is in the grammar, and what may follow.

The matcher takes in committed tokens only. Draft tokens are looked at and never taken in, so nothing is ever rolled
back: its state is a function of the grammar and the output.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher

from lorikeet.shard.scheduler.constraint import Unconstrained

MAX_FORCED = 32
"""Most forced tokens that one step verifies."""


@dataclass(frozen=True)
class Compiled:
    """The result of a compilation."""

    matcher: LLMatcher | None
    """At the grammar's start; copied for every request."""
    eos_id: int = -1
    error: str = ""
    """Why the grammar cannot be used."""


class GrammarMatcher(Unconstrained):
    """The constraint of one request."""

    is_constrained = True

    def __init__(self, compiling: Future[Compiled], proposes: bool) -> None:
        self.proposes = proposes
        self.eos_id = -1
        """The token that the grammar allows where its text is complete."""
        self._compiling = compiling
        self._matcher: LLMatcher | None = None

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return self._matcher is not None

    @property
    def matcher(self) -> LLMatcher:
        """Of a request that is ready."""
        assert self._matcher is not None
        return self._matcher

    def start(self, output_ids: Sequence[int]) -> bool:
        """Begin after the output of an earlier run. Returns whether the compilation has ended; `error` says how."""
        if not self._compiling.done():
            return False
        compiled = self._compiling.result()
        self.error = compiled.error
        if compiled.matcher is not None:
            matcher = compiled.matcher.deep_copy()
            if output_ids and not matcher.consume_tokens(list(output_ids)):
                self.error = f"the output so far does not match the grammar: {reason(matcher)}"
            self._matcher, self.eos_id = matcher, compiled.eos_id
            self.is_complete = bool(matcher.is_stopped())
        return True

    def num_allowed(self, draft_ids: Sequence[int]) -> int:
        return int(self.matcher.validate_tokens(list(draft_ids)))

    def forced_ids(self) -> list[int]:
        return list(self.matcher.compute_ff_tokens()[:MAX_FORCED]) if self.proposes else []

    def commit(self, token_id: int) -> bool:
        if not self.matcher.consume_token(token_id):
            self.error = f"the grammar cannot be continued: {reason(self.matcher)}"
            return False
        self.is_complete = bool(self.matcher.is_stopped())
        return self.is_complete


def reason(matcher: LLMatcher) -> str:
    """The first line of the matcher's error, "" without one; the others are its whole state."""
    return (matcher.get_error().splitlines() or [""])[0]
