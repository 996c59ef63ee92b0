"""How many prompt tokens a step computes, in all and per adapter. Imports no torch, reads no clock."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from lorikeet.proto.shares import DEVICE_ROOM
from lorikeet.shard.requests.request import Request

SHORTEST_S, LONGEST_S = 0.07, 0.35
"""Seconds of a step with prompts next to requests that decode: with few prompts waiting, so that streams do not
pause, and with many, so that first tokens come soon.
"""
BACKLOG_SHARE = 1 / 16
"""Part of the time of all waiting prompts that a step spends on them, between the two."""
LEAST_SLOWDOWN, MOST_SLOWDOWN = 1.5, 4.0
"""Both are at least so many times a step that only decodes: prompts keep pace with decoding on slow machines too."""
NUM_MEASURED, LEAST_MEASURED, LEAST_TOKENS = 7, 32, 16
"""Newest steps whose times count, prompt tokens of a step whose time counts, and prompt tokens of a step at least."""
CAP_SLOWDOWN = 1.5
"""Time that the prompts of one capped adapter may add to a step, as a multiple of a step that only decodes: enough for
prompts to keep pace with the requests that decode, and little for the requests of other adapters."""
LEAST_CAP, MOST_CAP = 16, 512
RECENT_STEPS = 128
"""Steps after which an adapter without requests no longer counts."""
CAPPED_STEPS = 4
"""Where prompts of adapters without a cap would fill this many steps, every second step has no caps."""
CALM_STEPS = 32
"""Steps that must succeed before they may be twice as large."""


@dataclass(frozen=True)
class Limits:
    """What one step and one shard may hold."""

    step_tokens: int
    """Most tokens that a step computes for requests more than one token behind; those one token behind always fit."""
    max_running: int
    chunked_prefill: bool = True
    max_scored: int = 512
    """Most prompt tokens of a step whose logits are wanted (a row of the vocabulary each), with chunked prefill."""
    adapter_prefill_tokens: int | None = None
    """The prefill cap: as step_tokens, for all requests of an adapter that has many more than another, so that they do
    not make every request's steps long. With one request more it is three times this, and falls to this. None: no cap;
    prompts that are computed whole have none either."""
    follows_times: bool = False
    """Whether the prefill cap follows the times of steps. Before any was timed, a step then computes
    `adapter_prefill_tokens` prompt tokens."""
    short_room: int = DEVICE_ROOM
    """Requests that run in short steps, where callers share the shard."""


class PromptChunks:
    """Prompt tokens of the next step, by measured times of steps."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # seconds per token of steps with prompts, and seconds of steps without
        self._token_s: deque[float] = deque(maxlen=NUM_MEASURED)
        self._decode_s: deque[float] = deque(maxlen=NUM_MEASURED)

    def observe(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """Record a step of so many tokens."""
        if num_prompt_tokens >= LEAST_MEASURED:
            self._token_s.append(seconds / num_tokens)
        elif not num_prompt_tokens:
            self._decode_s.append(seconds)

    def choose(self, num_waiting: int, num_decoding: int) -> int:
        """Most prompt tokens of a step, of `num_waiting` that are to be computed, next to so many requests that decode.
        The limit without chunks.
        """
        limits = self._limits
        if not limits.chunked_prefill:
            return limits.step_tokens
        if not self._token_s:
            first = limits.adapter_prefill_tokens if limits.follows_times else None
            return limits.step_tokens if first is None else min(first, limits.step_tokens)
        token_s, decode_s = median(self._token_s), median(self._decode_s or (0.0,))
        shortest, seconds = max(SHORTEST_S, LEAST_SLOWDOWN * decode_s), max(LONGEST_S, MOST_SLOWDOWN * decode_s)
        if num_decoding:
            seconds = min(seconds, max(shortest, BACKLOG_SHARE * num_waiting * token_s))
        num_tokens = round(seconds / max(token_s, 1e-9)) - num_decoding
        return min(limits.step_tokens, max(LEAST_TOKENS, num_tokens))

    def adapter_cap(self) -> int:
        """The prefill cap of an adapter, where the limits have one."""
        assert self._limits.adapter_prefill_tokens is not None
        if not (self._limits.follows_times and self._token_s and self._decode_s):
            return self._limits.adapter_prefill_tokens
        num_tokens = CAP_SLOWDOWN * median(self._decode_s) / max(median(self._token_s), 1e-9)
        return max(LEAST_CAP, min(MOST_CAP, int(num_tokens)))


class AdapterPrefillCaps:
    """Prefill caps of the adapters with more requests in a shard than another, step by step."""

    def __init__(self, limits: Limits, chunks: PromptChunks) -> None:
        self._has_caps = limits.chunked_prefill and limits.adapter_prefill_tokens is not None
        self._chunks = chunks
        self._num_planned = 0
        self._seen: dict[str, int] = {}  # by adapter: the newest plan in which it had requests here

    def of(self, counts: Mapping[str, int]) -> dict[str, int]:
        """By adapter, "" for the bare base: the most prompt tokens it may have in the next step. An adapter with recent
        requests counts as having one, since its next may come at any moment. counts: requests here, by adapter.
        """
        if not self._has_caps:
            return {}
        self._num_planned += 1
        self._seen.update(dict.fromkeys(counts, self._num_planned))
        for digest in [digest for digest, seen in self._seen.items() if seen < self._num_planned - RECENT_STEPS]:
            del self._seen[digest]
        fewest = min((counts.get(digest, 1) for digest in self._seen), default=1)
        num_more = {digest: count - fewest for digest, count in counts.items() if count > fewest}
        if not num_more:
            return {}
        least = self._chunks.adapter_cap()
        return {digest: max(least, 3 * least // num) for digest, num in num_more.items()}


class Budget:
    """What is left of a step's tokens while it is being planned."""

    def __init__(
        self,
        limits: Limits,
        adapter_prefill_caps: dict[str, int],
        step_tokens: int | None = None,
        caller_limits: dict[str, int] | None = None,
    ) -> None:
        """adapter_prefill_caps: adapters whose prompts are planned in a second pass, and the tokens each may have.
        step_tokens: of this step, None for that of the limits. caller_limits: the tokens that some callers may have.
        """
        self._caller_limits = caller_limits or {}
        self.adapter_prefill_caps = adapter_prefill_caps
        self.pass_for_capped = False
        """Whether prompts of capped adapters are being planned, or everything else."""
        self.num_left = limits.step_tokens if step_tokens is None else step_tokens
        self.num_scored_left = limits.max_scored
        self._is_chunked = limits.chunked_prefill
        self._is_untouched = True

    def is_spent(self, request: Request) -> bool:
        """Whether the request's adapter gets nothing more in this pass, except for requests one token behind."""
        return self._left_for(request) <= 0

    def grant(self, request: Request) -> int:
        """Tokens of the request that fit. A request one token behind always fits.

        Without chunks a request waits until all it lacks fits, or is alone in the budget if it never would.
        """
        if request.num_known >= request.num_prompt + request.max_new_tokens:
            return 0
        num_behind = request.num_known - request.num_computed
        if num_behind <= 1:
            return 0 if self.pass_for_capped else num_behind
        if not self._is_chunked:
            return num_behind if num_behind <= self._left_for(request) or self._is_untouched else 0
        if request.num_shareable < len(request.token_ids) - 1:
            num_behind = min(num_behind, self.num_scored_left)
        return min(num_behind, max(0, self._left_for(request)))

    def spend(self, request: Request, num_tokens: int) -> None:
        """Take a grant of more than one token."""
        self.num_left -= num_tokens
        self._is_untouched = False
        if request.caller in self._caller_limits:
            self._caller_limits[request.caller] -= num_tokens
        if request.adapter_digest in self.adapter_prefill_caps:
            self.adapter_prefill_caps[request.adapter_digest] -= num_tokens
        if request.logprobs.prefill:
            self.num_scored_left -= num_tokens

    def _left_for(self, request: Request) -> int:
        if (request.adapter_digest in self.adapter_prefill_caps) != self.pass_for_capped:
            return 0
        left = min(self.num_left, self._caller_limits.get(request.caller, self.num_left))
        return min(left, self.adapter_prefill_caps.get(request.adapter_digest, left))


class OomBackoff:
    """How large a step may be now: smaller for a while after one that ran out of device memory."""

    def __init__(self, step_tokens: int, max_running: int, is_chunked: bool = True) -> None:
        """The limits without any backoff. `is_chunked`: whether a prompt may be computed over several steps."""
        self._most = (step_tokens, max_running)
        self._is_chunked = is_chunked
        self.step_tokens, self.max_running = self._most
        self._num_calm = 0

    @property
    def is_active(self) -> bool:
        """Whether steps are smaller than the limits."""
        return (self.step_tokens, self.max_running) != self._most

    def on_oom(self, num_tokens: int, num_requests: int) -> bool:
        """A step of this size was too large: halve the next ones. False where no step is smaller."""
        self._num_calm = 0
        if num_requests == 1 and (num_tokens == 1 or not self._is_chunked):
            return False
        self.step_tokens = max(1, min(self.step_tokens, num_tokens // 2))
        self.max_running = max(1, min(self.max_running, num_requests // 2))
        return True

    def on_success(self) -> None:
        """A step succeeded."""
        if not self.is_active:
            return
        self._num_calm += 1
        if self._num_calm == CALM_STEPS:
            self._num_calm = 0
            step_tokens, max_running = self._most
            self.step_tokens = min(2 * self.step_tokens, step_tokens)
            self.max_running = min(2 * self.max_running, max_running)
