"""Callers have fair shares of a shard, through whichever routers they come: whose waiting request is next, how many
requests of each may run, and how many prompt tokens of each a step computes.

A caller alone gets everything. Imports no torch, reads no clock.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from lorikeet.proto.shares import MAX_UNSTARTED_TOKENS, Shares, fair_limits, limits_of
from lorikeet.shard.requests.request import Request
from lorikeet.shard.scheduler.budget import RECENT_STEPS

_NOTHING = Counter[str]()


class Callers:
    """The callers of one shard's requests. Work is tokens: of the prompt when a request runs, of its output when it
    leaves.
    """

    def __init__(self, max_running: int, short_room: int) -> None:
        """short_room: requests that run in steps which are short."""
        self._max_running, self._short_room = max_running, short_room
        self._shares = Shares()
        self._running, self._waiting = Counter[str](), Counter[str]()
        """Requests of the callers that have any."""
        self._weights: dict[str, float] = {}
        """Of the callers with requests, and of those that had some lately."""
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
        self._waiting[caller] += 1
        self._weights[caller] = request.share
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
        if self._decrease(self._waiting, request.caller):
            self._shares.leave(request.caller)

    def stops_running(self, request: Request) -> None:
        """A running request has ended or waits again."""
        self._shares.charge(request.caller, len(request.token_ids) - request.num_charged)
        self._decrease(self._running, request.caller)

    def plan(self) -> None:
        """Another step is planned: callers that left long ago no longer count."""
        self._num_planned += 1
        while self._left_at:
            caller, left_at = next(iter(self._left_at.items()))
            if left_at >= self._num_planned - RECENT_STEPS:
                return
            del self._left_at[caller], self._weights[caller]
            self._has_changed = True

    def forget_idle(self) -> None:
        """No request is left: forget what callers owe."""
        self._shares.forget_idle()
        self._weights.clear()
        self._left_at.clear()
        self._limits, self._has_changed = {}, False

    @property
    def limits(self) -> dict[str, int]:
        """The most running requests of callers that ask for more than they get."""
        if self._has_changed:
            self._has_changed, self._limits = False, {}
            if len(self._weights) > 1:
                asked = {name: max(1, self._running[name] + self._waiting[name]) for name in self._weights}
                self._limits, _ = limits_of(asked, self._weights, self._max_running, self._short_room)
        return self._limits

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

    def in_turn(self, waiting: Sequence[Request]) -> Iterator[Request]:
        """Waiting requests, which come in order of arrival: one of the caller whose turn it is, after those before have
        run or been passed over.
        """
        if not self.are_several:
            yield from tuple(waiting)
            return
        lanes: defaultdict[str, deque[Request]] = defaultdict(deque)
        for request in waiting:
            lanes[request.caller].append(request)
        for caller in self._shares.turns(lambda name: not lanes[name] or self.is_blocked(name)):
            yield lanes[caller].popleft()

    def prompt_tokens(self, requests: Iterable[Request]) -> Counter[str]:
        """Tokens of prompts that could be computed now, by caller, of those whose requests may run."""
        tokens = Counter[str]()
        for request in requests:
            num_behind = request.num_known - request.num_computed
            if num_behind > 1 and (request.row >= 0 or not self.is_blocked(request.caller)):
                tokens[request.caller] += num_behind
        return tokens

    def prompt_limits(self, tokens: Counter[str], step_tokens: int) -> dict[str, int]:
        """The most prompt tokens of a step, of callers with more of them than their share."""
        return fair_limits(tokens, self._weights, step_tokens) if len(tokens) > 1 else {}

    def check(self, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        """Prove that the requests of callers are counted. Raises RuntimeError."""
        counts = (Counter(request.caller for request in requests) for requests in (running, waiting))
        if tuple(counts) != (self._running, self._waiting):
            raise RuntimeError("counts of callers' requests leaked")
        if not self._weights.keys() >= self._running.keys() | self._waiting.keys():
            raise RuntimeError("weights of callers with requests are missing")

    def _decrease(self, counts: Counter[str], caller: str) -> bool:
        """Whether that was the caller's last one."""
        self._has_changed = True
        counts[caller] -= 1
        if counts[caller]:
            return False
        del counts[caller]
        if not (self._running[caller] or self._waiting[caller]):
            self._left_at[caller] = self._num_planned
        return True


def backlog(tokens: Counter[str]) -> int:
    """Prompt tokens that make steps longer, of several callers: those of one must not make all others' steps long."""
    return min(tokens.total(), MAX_UNSTARTED_TOKENS)
