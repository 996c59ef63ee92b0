"""What a step may compute: how many prompt tokens, in all and per adapter, and the shares of callers, through whichever
routers they come: whose waiting request is next, how many requests of each run, how many prompt tokens each gets.

A caller alone gets everything. Imports no torch, reads no clock.
"""

from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple, Self

from lorikeet.proto.shares import DEVICE_ROOM, MAX_UNSTARTED_TOKENS, Shares, fair_limits, limits_of
from lorikeet.shard.requests.request import Request

SHORTEST_S, LONGEST_S = 0.07, 0.35
"""Seconds of a step with prompts next to requests that decode: with few prompts waiting, so that streams do not
pause, and with many, so that first tokens come soon.
"""
SHARED_S = 0.010
"""The same where one caller asks for more than its share and another for less, which waits for some of these steps."""
BACKLOG_SHARE = 1 / 16
"""Part of the time of all waiting prompts that a step spends on them, between the two."""
SHORT_PROMPT_TOKENS = 64
"""Waiting prompt tokens of a caller, up to which they may come before those of others."""
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
        self._least = LEAST_MEASURED

    def observe(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """Record a step of so many tokens."""
        if num_prompt_tokens >= self._least:
            self._token_s.append(seconds / num_tokens)
        elif not num_prompt_tokens:
            self._decode_s.append(seconds)

    def estimate(self, num_prompt_tokens: int, num_tokens: int) -> float | None:
        """Seconds of a step of so many tokens; None where too few of them are prompt tokens, or none was measured."""
        is_known = num_prompt_tokens >= self._least and len(self._token_s) > 0
        return num_tokens * median(self._token_s) if is_known else None

    def choose(self, num_waiting: int, num_decoding: int, is_short: bool = False) -> int:
        """Most prompt tokens of a step, of `num_waiting` that are to be computed, next to so many requests that decode.
        The limit without chunks. `is_short`: a caller that asks for less than its share waits for the step.
        """
        limits = self._limits
        if not limits.chunked_prefill:
            return limits.step_tokens
        if not self._token_s:
            first = limits.adapter_prefill_tokens if limits.follows_times else None
            return limits.step_tokens if first is None else min(first, limits.step_tokens)
        token_s, decode_s = median(self._token_s), median(self._decode_s or (0.0,))
        shortest, seconds = max(SHORTEST_S, LEAST_SLOWDOWN * decode_s), max(LONGEST_S, MOST_SLOWDOWN * decode_s)
        if is_short:
            seconds = max(SHARED_S, LEAST_SLOWDOWN * decode_s)
        elif num_decoding:
            seconds = min(seconds, max(shortest, BACKLOG_SHARE * num_waiting * token_s))
        num_tokens = round(seconds / max(token_s, 1e-9)) - num_decoding
        chosen = min(limits.step_tokens, max(LEAST_TOKENS, num_tokens))
        self._least = min(LEAST_MEASURED, chosen // 2)  # small steps count where all are small: times may fall again
        return chosen

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


class PromptKind(NamedTuple):
    """What the shares of a prompt's tokens depend on."""

    caller: str
    adapter_digest: str
    is_scored: bool
    """Whether the log probabilities of their tokens are wanted."""

    @classmethod
    def of(cls, request: Request) -> Self:
        return cls(request.caller, request.adapter_digest, is_scored(request))


class PromptShares:
    """Prompt tokens that could be computed now, and the fair shares of their callers in a token budget."""

    def __init__(self, tokens: Counter[PromptKind], weights: Mapping[str, float]) -> None:
        """weights: of callers, 1 for others."""
        self._tokens = tokens
        self._weights = weights

    def by_caller(self, adapter_digest: str | None = None, *, is_scored: bool = False) -> Counter[str]:
        """Tokens of prompts by caller: of all, of those of an adapter, or of those that are scored."""
        tokens = Counter[str]()
        for kind, number in self._tokens.items():
            if adapter_digest in (None, kind.adapter_digest) and (kind.is_scored or not is_scored):
                tokens[kind.caller] += number
        return tokens

    def limits(self, num_tokens: int, adapter_digest: str | None = None, *, is_scored: bool = False) -> dict[str, int]:
        """The most tokens, of `num_tokens` for such prompts, of callers with more of them than their share. Where many
        have, shares of a short step are a few tokens: short prompts get up to half of them, the shortest first, so that
        they do not wait for several steps.
        """
        tokens = self.by_caller(adapter_digest, is_scored=is_scored)
        if len(tokens) < 2 or not (limits := fair_limits(tokens, self._weights, num_tokens)):
            return {}
        first, num_left = dict[str, int](), num_tokens // 2
        for name in sorted(tokens, key=tokens.__getitem__):
            number = min(tokens[name], num_left)
            if tokens[name] > SHORT_PROMPT_TOKENS or number < limits.get(name, tokens[name]):
                break
            first[name] = number
            num_left -= number
        others = {name: number for name, number in tokens.items() if name not in first}
        return {**fair_limits(others, self._weights, num_tokens - sum(first.values())), **first}


class TokenBudget:
    """Prompt tokens that are left, and how many of them each caller may have that wants more than its share."""

    def __init__(self, num_left: int, caller_limits: dict[str, int]) -> None:
        self.num_left = num_left
        self._caller_limits = caller_limits

    def left_for(self, caller: str) -> int:
        return min(self.num_left, self._caller_limits.get(caller, self.num_left))

    def spend(self, caller: str, num_tokens: int) -> None:
        self.num_left -= num_tokens
        if caller in self._caller_limits:
            self._caller_limits[caller] -= num_tokens


class Budget:
    """What is left of a step's tokens while it is being planned: of the step, of the prefill cap of each adapter that
    has one, and of the prompt tokens whose log probabilities are wanted. Callers have fair shares of each.
    """

    def __init__(
        self,
        limits: Limits,
        adapter_prefill_caps: dict[str, int],
        step_tokens: int | None = None,
        shares: "PromptShares | None" = None,
    ) -> None:
        """adapter_prefill_caps: adapters whose prompts are planned in a second pass, and the tokens each may have.
        step_tokens: of this step, None for that of the limits. shares: those of callers, None where none shares a step.
        """
        shares = shares or PromptShares(Counter(), {})
        num_tokens = limits.step_tokens if step_tokens is None else step_tokens
        self._step = TokenBudget(num_tokens, shares.limits(num_tokens))
        self._capped = {
            digest: TokenBudget(cap, shares.limits(cap, digest)) for digest, cap in adapter_prefill_caps.items()
        }
        self._scored = TokenBudget(limits.max_scored, shares.limits(limits.max_scored, is_scored=True))
        self.pass_for_capped = False
        """Whether prompts of capped adapters are being planned, or everything else."""
        self._is_chunked = limits.chunked_prefill
        self._is_untouched = True

    @property
    def num_left(self) -> int:
        """Tokens of the step."""
        return self._step.num_left

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
        if is_scored(request):
            num_behind = min(num_behind, self._scored.left_for(request.caller))
        return min(num_behind, max(0, self._left_for(request)))

    def spend(self, request: Request, num_tokens: int) -> None:
        """Take a grant of more than one token."""
        self._is_untouched = False
        self._step.spend(request.caller, num_tokens)
        if (capped := self._capped.get(request.adapter_digest)) is not None:
            capped.spend(request.caller, num_tokens)
        if is_scored(request):
            self._scored.spend(request.caller, num_tokens)

    def spend_on_drafts(self, num_tokens: int) -> None:
        """Take tokens for drafts."""
        self._step.num_left -= num_tokens

    def _left_for(self, request: Request) -> int:
        capped = self._capped.get(request.adapter_digest)
        if (capped is not None) != self.pass_for_capped:
            return 0
        left = self._step.left_for(request.caller)
        return left if capped is None else min(left, capped.left_for(request.caller))


def is_scored(request: Request) -> bool:
    """Whether log probabilities of the prompt are still to be computed."""
    return request.num_shareable < len(request.token_ids) - 1


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


_NOTHING = Counter[str]()


class Callers:
    """The callers of one shard's requests. Work is tokens: of the prompt when a request runs, of its output when it
    leaves.
    """

    def __init__(self, max_running: int, short_room: int) -> None:
        """short_room: requests that run in steps which are short."""
        self._max_running, self._short_room = max_running, short_room
        self._shares = Shares()
        self._running = Counter[str]()
        """Requests of the callers of which some run."""
        self._lanes: dict[str, list[Request]] = {}
        """Waiting requests of each caller that has any, in order of arrival. A step looks at those that may run."""
        self._weights: dict[str, float] = {}
        """Of the callers with requests, and of those that had some lately."""
        self._held: dict[str, int] = {}
        """Of the same, the requests that wait in routers, as far as known."""
        self._left_at: dict[str, int] = {}
        """The plan after which each of the latter had none, oldest first."""
        self._num_planned = 0
        self._has_changed = False
        self._limits: dict[str, int] = {}

    @property
    def are_several(self) -> bool:
        """Whether more than one has requests, or had some lately."""
        return len(self._weights) > 1

    def waits(self, request: Request) -> None:
        """A request waits for pages and a row: a new one, or one that ran."""
        caller = request.caller
        self._shares.join(caller, request.share)
        insort(self._lanes.setdefault(caller, []), request, key=lambda other: other.order)
        self._weights[caller] = request.share
        self._held[caller] = request.num_held
        self._left_at.pop(caller, None)
        self._has_changed = True

    def runs(self, request: Request) -> None:
        """A waiting request runs from now on."""
        self._shares.take_turn(request.caller, len(request.token_ids) - request.num_computed)
        request.num_charged = len(request.token_ids)
        self._running[request.caller] += 1
        self.stops_waiting(request)

    def stops_waiting(self, request: Request) -> None:
        """A waiting request runs or has ended."""
        lane = self._lanes[request.caller]
        lane.remove(request)
        if not lane:
            del self._lanes[request.caller]
            self._shares.leave(request.caller)
        self._note_fewer(request.caller)

    def stops_running(self, request: Request) -> None:
        """A running request has ended or waits again."""
        caller = request.caller
        self._shares.charge(caller, len(request.token_ids) - request.num_charged)
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
        self._note_fewer(caller)

    def plan(self) -> None:
        """Another step is planned: callers that left long ago no longer count."""
        self._num_planned += 1
        while self._left_at:
            caller, left_at = next(iter(self._left_at.items()))
            if left_at >= self._num_planned - RECENT_STEPS:
                return
            del self._left_at[caller], self._weights[caller], self._held[caller]
            self._has_changed = True

    def forget_idle(self) -> None:
        """No request is left: forget what callers owe."""
        self._shares.forget_idle()
        self._weights.clear()
        self._held.clear()
        self._left_at.clear()
        self._limits, self._has_changed = {}, False

    @property
    def limits(self) -> dict[str, int]:
        """The most running requests of callers that ask for more than they get."""
        if self._has_changed:
            self._has_changed, self._limits = False, {}
            if len(self._weights) > 1:
                held = self._held.items()
                asked = {name: max(1, self._running[name] + self._num_waiting(name) + number) for name, number in held}
                self._limits, _ = limits_of(asked, self._weights, self._max_running, self._short_room)
        return self._limits

    @property
    def are_unequal(self) -> bool:
        """Whether some ask for more than they get, and others for less."""
        return 0 < len(self.limits) < len(self._weights)

    def excess(self) -> Counter[str]:
        """How many requests too many run, by caller."""
        if not self.limits:
            return _NOTHING
        return Counter(
            {name: self._running[name] - limit for name, limit in self.limits.items() if self._running[name] > limit}
        )

    def has_running(self, caller: str) -> bool:
        return self._running[caller] > 0

    def largest(self) -> str | None:
        """The caller with the most running requests, if it has several."""
        name = max(self._running, key=self._running.__getitem__, default=None)
        return name if name is not None and self._running[name] > 1 else None

    def is_blocked(self, caller: str) -> bool:
        """Whether no further request of the caller may run."""
        return self._running[caller] >= self.limits.get(caller, inf)

    def in_turn(self) -> Iterator[Request]:
        """Waiting requests: the next one of the caller whose turn it is, after those before have run or been passed
        over.
        """
        lanes: dict[str, deque[Request]] = {}

        def is_over(caller: str) -> bool:
            if self.is_blocked(caller):
                return True
            if caller not in lanes:
                lanes[caller] = deque(self._lanes[caller])
            return not lanes[caller]

        for caller in self._shares.turns(is_over):
            yield lanes[caller].popleft()

    def prompt_shares(
        self, running: Iterable[Request], is_parked: Callable[[Request], bool], enough: int
    ) -> PromptShares:
        """Prompts that could be computed now: of requests that run, and of those that may. The latter are counted up to
        `enough` tokens of a caller.
        """
        tokens, of_callers = Counter[PromptKind](), Counter[str]()
        for request in running:
            num_behind = request.num_known - request.num_computed
            if num_behind > 1:
                tokens[PromptKind.of(request)] += num_behind
                of_callers[request.caller] += num_behind
        for caller, lane in self._lanes.items():
            if self.is_blocked(caller):
                continue
            for request in lane:
                if of_callers[caller] >= enough:
                    break
                num_behind = request.num_known - request.num_computed
                if num_behind > 1 and not is_parked(request):
                    tokens[PromptKind.of(request)] += num_behind
                    of_callers[caller] += num_behind
        return PromptShares(tokens, self._weights)

    def check(self, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        """Prove that the requests of callers are counted. Raises RuntimeError."""
        lanes: defaultdict[str, list[Request]] = defaultdict(list)
        for request in waiting:
            lanes[request.caller].append(request)
        if (Counter(request.caller for request in running), lanes) != (self._running, self._lanes):
            raise RuntimeError("callers' requests leaked")
        if not self._weights.keys() >= self._running.keys() | self._lanes.keys():
            raise RuntimeError("weights of callers with requests are missing")

    def _num_waiting(self, caller: str) -> int:
        return len(self._lanes.get(caller, ()))

    def _note_fewer(self, caller: str) -> None:
        """One of the caller's requests no longer waits, or no longer runs."""
        self._has_changed = True
        if not (self._running[caller] or caller in self._lanes):
            self._left_at[caller] = self._num_planned


def backlog(tokens: Counter[str]) -> int:
    """Prompt tokens that make steps longer, of several callers: those of one must not make all others' steps long."""
    return min(tokens.total(), MAX_UNSTARTED_TOKENS)
