"""An engine in this process, without router and network: requests in, the result of every step out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lorikeet.proto.params import NO_SPECULATION, LogprobParams, SamplingParams, Speculation
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import NO_SECONDS, Commands, Inbox, Outbox, Output, Refusal, StreamOpened
from lorikeet.shard.model import Model
from lorikeet.shard.requests.request import Request
from lorikeet.shard.speculation.length import DraftLengthController
from lorikeet.shard.startup.build import build_engine

EPOCH = 1
PARKED_S = 0.001
"""Between two looks while every request waits for an adapter."""


@dataclass(frozen=True)
class EngineRequest:
    """One request."""

    prompt_ids: Sequence[int]
    num_tokens: int
    speculation: Speculation = NO_SPECULATION
    sampling: SamplingParams = field(default_factory=SamplingParams)
    adapter_digest: str = ""
    heads_digest: str = ""
    alternatives: int = 0
    """Likeliest tokens to tell at every position, with their log probabilities."""


@dataclass(frozen=True)
class StepResult:
    """What one step gave one request."""

    token_ids: Sequence[int]
    num_drafted: int
    num_accepted: int
    at: float
    """time.perf_counter() when it was known."""
    seconds: tuple[float, float, float] = NO_SECONDS
    """What proposing, verifying and accepting took in a step with drafts."""
    alternatives: Sequence[float] = ()
    """Log probabilities of the alternatives of all tokens, one after the other."""
    gap_us: int = 0
    """That the device had waited for the host between steps so far, as the shard tells its routers."""


@dataclass
class Run:
    """What became of one request."""

    wanted: EngineRequest
    asked_at: float = 0.0
    """time.perf_counter() when it was submitted."""
    steps: list[StepResult] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for gave in self.steps for token_id in gave.token_ids]


class EngineHarness:
    """An engine with nobody else in it."""

    def __init__(self, config: ShardConfig, model: Model, draft_model: Model | None = None) -> None:
        self._inbox, self._outbox = Inbox(), Outbox()
        self._engine = build_engine(config, model, self._inbox, self._outbox, draft_model)
        self._engine.warm_up()
        self._outbox.open(EPOCH, wake=lambda: None)
        self._inbox.put(StreamOpened(EPOCH))
        self._num_made = 0
        self._open: dict[int, Run] = {}
        self._at_once = config.max_running
        self._draft_lengths: dict[str, DraftLengthController] = {}

    def learn_as(self, name: str) -> None:
        """From now on schedules know what they learnt under that name alone."""
        proposer = self._engine.scheduler.proposer
        assert proposer is not None
        proposer.draft_length = self._draft_lengths.setdefault(name, DraftLengthController())

    @property
    def is_idle(self) -> bool:
        return not self._open

    def submit(
        self, wanted: Sequence[EngineRequest], began: Callable[[int, Request], None] = lambda number, request: None
    ) -> list[Run]:
        """Ask for these from the next step on. `began` hears of each request, by its place, as it is made."""
        runs = [Run(each, time.perf_counter()) for each in wanted]
        requests: list[Request | Refusal] = []
        for number, run in enumerate(runs):
            request = _request((EPOCH, self._num_made), run.wanted)
            began(number, request)
            requests.append(request)
            self._open[self._num_made] = run
            self._num_made += 1
        self._inbox.put(Commands(EPOCH, submits=requests))
        return runs

    def turn(self) -> None:
        """One step, and what it gave."""
        self._engine.step()
        now = time.perf_counter()
        update = self._outbox.take(EPOCH)
        for output in update.request_outputs():
            if self._note(self._open[output.key[1]], output, now, update.status.gap_us):
                del self._open[output.key[1]]
        if self._open and not self._engine.scheduler.running:  # they wait for adapters
            self._inbox.wait(PARKED_S)

    def run(
        self, wanted: Sequence[EngineRequest], began: Callable[[int, Request], None] = lambda number, request: None
    ) -> list[Run]:
        """Run all, as many at once as may, and return them in order. `began` hears of each request as it is made."""
        runs: list[Run] = []
        while len(runs) < len(wanted) or self._open:
            if more := wanted[len(runs) : len(runs) + self._at_once - len(self._open)]:
                runs += self.submit(more, partial(_counted_from, len(runs), began))
            self.turn()
        self.finish()
        return runs

    def finish(self) -> None:
        """Run what is open to its end, and prove that nothing is left of it."""
        while self._open:
            self.turn()
        while not self._engine.scheduler.is_idle:  # a step may be under way whose tokens nobody takes
            self._engine.step()
        self._engine.scheduler.check()

    @staticmethod
    def _note(run: Run, output: Output, now: float, gap_us: int) -> bool:
        """Whether the request has ended with this, known `now`."""
        if output.error:
            raise RuntimeError(output.error)
        if output.token_ids:
            drafted = sum(output.num_drafted)
            found = () if output.details is None else output.details.alternative_logprobs
            run.steps.append(
                StepResult(output.token_ids, drafted, output.num_accepted, now, output.seconds, found, gap_us)
            )
        return bool(output.finish_reason)


def _counted_from(first: int, began: Callable[[int, Request], None], number: int, request: Request) -> None:
    began(first + number, request)


def _request(key: tuple[int, int], wanted: EngineRequest) -> Request:
    prompt = list(wanted.prompt_ids)
    request = Request(key, prompt, len(prompt), wanted.num_tokens, wanted.sampling)
    request.speculation = wanted.speculation
    request.adapter_digest, request.heads_digest = wanted.adapter_digest, wanted.heads_digest
    if wanted.alternatives:
        request.logprobs = LogprobParams(wanted=True, alternatives=wanted.alternatives)
    return request
