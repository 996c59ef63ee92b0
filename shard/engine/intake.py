"""Where the routers' commands meet the scheduler: streams, duplicates, refusals, aborts. Runs in the loop's thread."""

from lorikeet.shard.grpc.inbox import AdapterRead, Commands, Inbox, Refusal, StreamEnded, StreamOpened
from lorikeet.shard.grpc.outbox import AdapterEvent, Output
from lorikeet.shard.scheduler.adapter_slots import Residency
from lorikeet.shard.scheduler.request import FinishReason, Request
from lorikeet.shard.scheduler.scheduler import Scheduler

NO_ADAPTERS = "this shard serves no adapters"
MOST_PARKED = 1024
"""Requests that wait for their adapter; they take no credit."""


class Intake:
    """What each stream has submitted and may still submit."""

    def __init__(self, inbox: Inbox, scheduler: Scheduler, max_open: int) -> None:
        self.is_ending = False
        """Nothing new is taken: the shard ends when its requests have."""
        self.acknowledged: dict[int, int] = {}  # by stream: submits taken into account
        self.refused_adapters: dict[str, AdapterEvent] = {}  # asked for in vain since last reported
        self._inbox = inbox
        self._scheduler = scheduler
        self._max_open = max_open

    def apply(self) -> list[Output]:
        """Take in all that came since the last call. Returns what is to be said about it."""
        outputs: list[Output] = []
        for item in self._inbox.drain():
            if isinstance(item, StreamOpened):
                self.acknowledged[item.epoch] = 0
                if self._scheduler.adapters is not None:
                    self._scheduler.adapters.tell_all()
            elif isinstance(item, StreamEnded):
                self._end(item.epoch)
            elif isinstance(item, AdapterRead):
                self._take_adapter(item)
            elif item.epoch in self.acknowledged:
                self._take(item, outputs)
        return outputs

    def _take(self, commands: Commands, outputs: list[Output]) -> None:
        epoch = commands.epoch
        num_open = sum(key[0] == epoch for key in self._scheduler.requests)
        self.acknowledged[epoch] += len(commands.submits)
        for submit in commands.submits:
            refusal = self._refuse(submit, num_open)
            if refusal is not None:
                outputs.append(refused(refusal))
            elif isinstance(submit, Request):
                self._scheduler.add(submit)
                num_open += 1
        for request_id in commands.abort_ids:
            request = self._scheduler.requests.get((epoch, request_id))
            if request is not None:
                self._scheduler.finish(request, FinishReason.ABORTED)
                outputs.append(Output(request.key, finish_reason=FinishReason.ABORTED))
        self._move_adapters(commands)

    def _move_adapters(self, commands: Commands) -> None:
        adapters = self._scheduler.adapters
        if adapters is None:
            wanted = [*commands.prefetches, *(digest for digest, _ in commands.pins)]
            self.refused_adapters |= dict.fromkeys(wanted, (Residency.FAILED, NO_ADAPTERS))
            return
        for digest in commands.prefetches:
            adapters.prefetch(digest)
        for digest, pinned in commands.pins:
            adapters.pin(digest, pinned)
        for digest in commands.unloads:
            adapters.unload(digest)

    def _take_adapter(self, item: AdapterRead) -> None:
        adapters = self._scheduler.adapters
        if adapters is None:
            return
        if item.content is None:
            adapters.failed(item.digest, item.reason)
        else:
            adapters.loaded(item.digest, item.content)

    def _refuse(self, submit: Request | Refusal, num_open: int) -> Refusal | None:
        running = self._scheduler.requests.get(submit.key)
        if running is not None:  # the two could not be told apart on the wire, so neither goes on
            self._scheduler.finish(running, FinishReason.ERROR)
            return Refusal(submit.key, f"request id {submit.key[1]} was used twice")
        if isinstance(submit, Refusal):
            return submit
        if self.is_ending:
            return Refusal(submit.key, "the shard takes no more requests", retryable=True)
        if num_open - self._scheduler.num_parked >= self._max_open or num_open >= MOST_PARKED + self._max_open:
            return Refusal(submit.key, "more requests than credit", retryable=True)
        adapters = self._scheduler.adapters
        reject_reason = "" if adapters is None else adapters.reject_reason(submit.digests)
        return Refusal(submit.key, reject_reason) if reject_reason else None

    def _end(self, epoch: int) -> None:
        """A router is gone: nobody waits for its requests any more."""
        self.acknowledged.pop(epoch, None)
        for request in [request for key, request in self._scheduler.requests.items() if key[0] == epoch]:
            self._scheduler.finish(request, FinishReason.ABORTED)


def refused(refusal: Refusal) -> Output:
    """How a refusal is told."""
    return Output(refusal.key, finish_reason=FinishReason.ERROR, error=refusal.reason, retryable=refusal.retryable)
