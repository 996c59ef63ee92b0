"""Applies the routers' commands to the scheduler: streams, duplicates, rejections, aborts. Runs in the step loop."""

import time
from collections import Counter
from collections.abc import Iterable

from lorikeet.proto import shard_pb2 as pb
from lorikeet.shard.grammar.compiler import GrammarCompiler
from lorikeet.shard.grpc.streams import (
    MAX_DETAILS,
    AdapterRead,
    Commands,
    Inbox,
    LearningAsked,
    Outbox,
    Output,
    Refusal,
    StepDetail,
    StreamEnded,
    StreamOpened,
)
from lorikeet.shard.learning.learning import Learning
from lorikeet.shard.requests.request import FinishReason, Request
from lorikeet.shard.scheduler.scheduler import Scheduler, StepPlan

NO_GRAMMARS = "this shard takes no grammars: its model has no fast tokenizer (tokenizer.json)"
MOST_PARKED = 1024
"""Most requests that wait for their adapter; they take no credit."""
PAUSE_S = 5.0
"""So long nothing more is read of a stream that has sent more requests than it has credit for, as no router does."""
COUNTED_STEPS = 16
"""Steps for which streams have the same credit, as long as they have the same requests: only tokens were added."""
PERIOD_S = 0.1
MAX_WATCH_S = 60.0


class StepWatch:
    """The streams whose routers watch, and until when."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._until: dict[int, float] = {}
        """By stream, in seconds of the monotonic clock."""
        self._next = 0.0

    def __bool__(self) -> bool:
        return bool(self._until)

    def begin(self, epoch: int, seconds: float) -> None:
        """A router watches for `seconds` from now."""
        self._until[epoch] = time.monotonic() + min(seconds, MAX_WATCH_S)

    def end(self, epoch: int) -> None:
        """The stream has ended."""
        self._until.pop(epoch, None)

    def describe(self, plan: StepPlan, waiting: Iterable[Request]) -> None:
        """The step that is about to run, to each stream that watches."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PERIOD_S
        for epoch, until in list(self._until.items()):
            if until < now:
                del self._until[epoch]
                continue
            own = [item for item in plan.items() if item.request.key[0] == epoch][:MAX_DETAILS]
            computed = [(item.request.key[1], item.end - item.start, len(item.draft_ids)) for item in own]
            # A request that waits and was admitted before has been preempted.
            preempted = [each.key[1] for each in waiting if each.key[0] == epoch and each.num_cached is not None]
            self._outbox.describe_step(epoch, StepDetail(computed, preempted[:MAX_DETAILS]))


class Intake:
    """What each stream has submitted and may still submit."""

    def __init__(
        self,
        inbox: Inbox,
        scheduler: Scheduler,
        max_open: int,
        grammars: GrammarCompiler | None,
        watch: StepWatch,
        learning: Learning | None,
    ) -> None:
        self.is_ending = False
        """Whether new requests are rejected, because the shard ends when its requests have."""
        self.acknowledged: dict[int, int] = {}  # by stream: submits that the credit accounts for
        self._watch = watch
        self._inbox = inbox
        self._scheduler = scheduler
        self._max_open = max_open
        self._grammars = grammars
        self._learning = learning
        self._compiling: list[Request] = []
        """Requests whose grammar is being compiled, or takes in tokens."""
        self._credits: dict[int, tuple[int, int]] = {}
        self._counted: tuple[object, ...] = ()
        """What the credits were counted of."""
        self._num_reused = 0
        """Steps since then."""

    def apply(self) -> list[Output]:
        """Apply all commands since the last call. Returns the outputs that they cause."""
        outputs: list[Output] = []
        for item in self._inbox.drain():
            if isinstance(item, StreamOpened):
                self.acknowledged[item.epoch] = 0
                self._scheduler.adapters.report_all()
            elif isinstance(item, StreamEnded):
                self._end(item.epoch)
            elif isinstance(item, AdapterRead):
                self._take_adapter(item)
            elif isinstance(item, LearningAsked):
                reply = pb.LearningReply() if self._learning is None else self._learning.answer(item.purge)
                item.answer.set_result(reply)
            elif item.epoch in self.acknowledged:
                self._take(item, outputs)
        self._start_compiled(outputs)
        return outputs

    def _take(self, commands: Commands, outputs: list[Output]) -> None:
        epoch = commands.epoch
        num_open = num_parked = 0
        if commands.submits:
            num_open = sum(key[0] == epoch for key in self._scheduler.requests)
            num_parked = sum(request.key[0] == epoch for request in self._scheduler.parked())
        self.acknowledged[epoch] += len(commands.submits)
        for submit in commands.submits:
            refusal = self._refuse(submit, num_open, num_parked)
            if refusal is not None:
                error, retryable = refusal.reason, refusal.retryable
                outputs.append(Output(refusal.key, finish_reason=FinishReason.ERROR, error=error, retryable=retryable))
            elif isinstance(submit, Request):
                if submit.grammar is not None and self._grammars is not None:
                    output_ids = submit.token_ids[submit.num_prompt :]
                    submit.constraint = self._grammars.match(submit.grammar, output_ids, caller=submit.caller)
                    self.match(submit)
                self._scheduler.add(submit)
                num_open += 1
                num_parked += self._scheduler.is_parked(submit)
        for request_id in commands.abort_ids:
            request = self._scheduler.requests.get((epoch, request_id))
            if request is not None:
                self._scheduler.finish(request, FinishReason.ABORTED)
                outputs.append(Output(request.key, finish_reason=FinishReason.ABORTED))
        if commands.watch_s:
            self._watch.begin(epoch, commands.watch_s)
        self._move_adapters(commands)

    def match(self, request: Request) -> None:
        """Watch a request whose constraint is not ready."""
        self._compiling.append(request)

    def _start_compiled(self, outputs: list[Output]) -> None:
        """Let the requests run whose grammar is compiled, and end those whose grammar cannot be."""
        waiting, self._compiling = self._compiling, []
        for request in waiting:
            if request.finish_reason:
                continue
            if not request.constraint.start():
                self._compiling.append(request)
            elif (error := request.constraint.error) and not self.match_apart(request):
                self._scheduler.finish(request, FinishReason.ERROR)
                outputs.append(Output(request.key, finish_reason=FinishReason.ERROR, error=error))
            elif request.constraint.is_ready and (reason := self._reason(request)):
                self._scheduler.finish(request, reason)
                outputs.append(Output(request.key, finish_reason=reason))

    @staticmethod
    def _reason(request: Request) -> FinishReason:
        """Why the output ends here: the newest tokens were taken in late, or the end was lost with an earlier shard."""
        if request.constraint.is_complete:
            return FinishReason.EOS
        return FinishReason.LENGTH if request.num_output >= request.max_new_tokens else FinishReason.NONE

    def credits(self, num_requests: int, num_tokens: int) -> dict[int, tuple[int, int]]:
        """Requests and KV tokens that streams may start although a shard has no room, by stream: what is missing to the
        fair share of its callers. The requests of other callers make room for them.

        num_requests, num_tokens: room of the shard, for all of them.
        """
        if len(self.acknowledged) < 2 or self.is_ending:
            return {}
        requests = self._scheduler.requests
        of = num_requests, num_tokens, self._scheduler.num_arrived, len(requests), tuple(self.acknowledged)
        self._num_reused += 1
        if of != self._counted or self._num_reused >= COUNTED_STEPS:
            self._counted, self._num_reused = of, 0
            self._credits = self._count_credits(num_requests, num_tokens)
        return self._credits

    def _count_credits(self, num_requests: int, num_tokens: int) -> dict[int, tuple[int, int]]:
        num_open, num_held, callers = Counter[int](), Counter[int](), set[tuple[int, str]]()
        for (epoch, _), request in self._scheduler.requests.items():
            num_open[epoch] += 1
            num_held[epoch] += request.num_known
            callers.add((epoch, request.caller))
        num_callers = Counter(epoch for epoch, _ in callers)
        shares = {epoch: max(1, num_callers[epoch]) for epoch in self.acknowledged}
        total = sum(shares.values())
        credits = {}
        for epoch, share in shares.items():
            missing = num_requests * share // total - num_open[epoch]
            tokens = num_tokens * share // total - num_held[epoch]
            if missing > 0 and tokens > 0:
                credits[epoch] = missing, tokens
        return credits

    def match_apart(self, request: Request) -> bool:
        """Compile a request's grammar for it alone, where others may have caused its error. Returns whether they may.

        The request must not run: it waits for the compilation.
        """
        if request.grammar is None or self._grammars is None or not request.constraint.may_be_shared:
            return False
        output_ids = request.token_ids[request.num_prompt :]
        request.constraint = self._grammars.match(request.grammar, output_ids, is_private=True, caller=request.caller)
        self.match(request)
        return True

    def _move_adapters(self, commands: Commands) -> None:
        adapters = self._scheduler.adapters
        for digest in commands.prefetches:
            adapters.prefetch(digest)
        for digest, pinned in commands.pins:
            adapters.pin(digest, pinned)
        for digest in commands.unloads:
            adapters.unload(digest)

    def _take_adapter(self, item: AdapterRead) -> None:
        if item.content is None:
            self._scheduler.adapters.failed(item.digest, item.reason)
        else:
            self._scheduler.adapters.loaded(item.digest, item.content)

    def _refuse(self, submit: Request | Refusal, num_open: int, num_parked: int) -> Refusal | None:
        """Why a request is not accepted from a stream that has so many, of which some are parked."""
        running = self._scheduler.requests.get(submit.key)
        if running is not None:  # the wire cannot tell the two apart, so both end
            self._scheduler.finish(running, FinishReason.ERROR)
            return Refusal(submit.key, f"request id {submit.key[1]} was used twice")
        if isinstance(submit, Refusal):
            return submit
        if self.is_ending:
            return Refusal(submit.key, "the shard takes no more requests", retryable=True)
        if num_open - num_parked >= self._max_open or num_open >= MOST_PARKED + self._max_open:
            self._inbox.pause(submit.key[0], PAUSE_S)
            return Refusal(submit.key, "more requests than credit", retryable=True)
        if submit.grammar is not None and self._grammars is None:
            return Refusal(submit.key, NO_GRAMMARS)
        reject_reason = self._scheduler.adapters.reject_reason(submit.digests)
        return Refusal(submit.key, reject_reason) if reject_reason else None

    def _end(self, epoch: int) -> None:
        """A router is gone: abort its requests."""
        self.acknowledged.pop(epoch, None)
        self._watch.end(epoch)
        for request in [request for key, request in self._scheduler.requests.items() if key[0] == epoch]:
            self._scheduler.finish(request, FinishReason.ABORTED)
