"""How many prompt tokens a step computes, in all and of each adapter. Imports no torch, reads no clock."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lorikeet.shard.scheduler.request import Request

WHILE = 128
"""Steps after which an adapter that had requests here counts no more."""


@dataclass(frozen=True)
class Limits:
    """What one step and one shard may hold."""

    step_tokens: int
    """Tokens of catching up by more than one that a step computes; requests one token behind always fit."""
    max_running: int
    chunked_prefill: bool = True
    max_scored: int = 512
    """Prompt tokens of a step whose logits are wanted at most (a row of the vocabulary each), with chunked prefill."""
    adapter_prefill_tokens: int | None = None
    """As step_tokens, for all requests of an adapter that has many more here than another, so that they do not make
    everyone's steps long; three times as much for one request more, falling to this. None: no such bound; nor is there
    one for prompts that are computed whole."""


class AdapterPrefillCaps:
    """Which adapters have more requests in a shard than another has, step by step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_planned = 0
        self._seen: dict[str, int] = {}  # by adapter: the newest plan in which it had requests here

    def of(self, requests: Iterable[Request]) -> dict[str, int]:
        """By adapter, "" for the bare base: how many prompt tokens it may have in the next step, given all requests in
        the shard. One that was here a while ago counts as having one left, since its next may come at any moment.
        """
        least = self._limits.adapter_prefill_tokens
        if least is None or not self._limits.chunked_prefill:
            return {}
        self._num_planned += 1
        counts = Counter(request.adapter_digest for request in requests)
        self._seen.update(dict.fromkeys(counts, self._num_planned))
        for digest in [digest for digest, seen in self._seen.items() if seen < self._num_planned - WHILE]:
            del self._seen[digest]
        fewest = min((counts[digest] or 1 for digest in self._seen), default=1)
        return {digest: max(least, 3 * least // (count - fewest)) for digest, count in counts.items() if count > fewest}


class Budget:
    """What is left of a step's tokens while it is being planned."""

    def __init__(self, limits: Limits, adapter_prefill_caps: dict[str, int], step_tokens: int | None = None) -> None:
        """crowds: adapters whose prompts have a turn of their own, and the tokens that each may have. step_tokens: of
        this step, None for the limits' own.
        """
        self.adapter_prefill_caps = adapter_prefill_caps
        self.pass_for_capped = False
        """Whose turn it is: prompts of theirs, or all else."""
        self.num_left = limits.step_tokens if step_tokens is None else step_tokens
        self.num_scored_left = limits.max_scored
        self._is_chunked = limits.chunked_prefill
        self._is_untouched = True

    def is_spent(self, request: Request) -> bool:
        """Whether the request's adapter gets nothing more now, but for requests a single token behind."""
        return self._left_for(request) <= 0

    def grant(self, request: Request) -> int:
        """Tokens of the request that fit. One that is a single token behind always fits.

        Without chunks a request waits until all it lacks fits, or is alone in the budget if it never would.
        """
        num_known = len(request.token_ids) + request.num_in_flight
        if num_known >= request.num_prompt + request.max_new_tokens:
            return 0
        num_behind = num_known - request.num_computed
        if num_behind <= 1:
            return 0 if self.pass_for_capped else num_behind
        if not self._is_chunked:
            return num_behind if num_behind <= self._left_for(request) or self._is_untouched else 0
        if request.num_shareable < len(request.token_ids) - 1:
            num_behind = min(num_behind, self.num_scored_left)
        return min(num_behind, max(0, self._left_for(request)))

    def spend(self, request: Request, num_tokens: int) -> None:
        """Take what was granted, more than one token."""
        self.num_left -= num_tokens
        self._is_untouched = False
        if request.adapter_digest in self.adapter_prefill_caps:
            self.adapter_prefill_caps[request.adapter_digest] -= num_tokens
        if request.logprobs.prefill:
            self.num_scored_left -= num_tokens

    def _left_for(self, request: Request) -> int:
        if (request.adapter_digest in self.adapter_prefill_caps) != self.pass_for_capped:
            return 0
        return min(self.num_left, self.adapter_prefill_caps.get(request.adapter_digest, self.num_left))
