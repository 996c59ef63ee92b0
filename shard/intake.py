"""Where the routers' commands meet the scheduler: streams, duplicates, refusals, aborts. Runs in the loop's thread."""

from shard.inbox import Commands, Inbox, Refusal, StreamEnded, StreamOpened
from shard.outbox import Output
from shard.request import FinishReason, Request
from shard.scheduler import Scheduler


class Intake:
    """What each stream has submitted and may still submit."""

    def __init__(self, inbox: Inbox, scheduler: Scheduler, max_open: int) -> None:
        self.is_ending = False
        """Nothing new is taken: the shard ends when its requests have."""
        self.acknowledged: dict[int, int] = {}  # by stream: submits taken into account
        self.failed_adapters: dict[int, list[str]] = {}  # by stream: what it asked for in vain since last reported
        self._inbox = inbox
        self._scheduler = scheduler
        self._max_open = max_open
        self._draining: set[int] = set()

    def apply(self) -> list[Output]:
        """Take in all that came since the last call. Returns what is to be said about it."""
        outputs: list[Output] = []
        for item in self._inbox.drain():
            if isinstance(item, StreamOpened):
                self.acknowledged[item.epoch] = 0
            elif isinstance(item, StreamEnded):
                self._end(item.epoch)
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
        if commands.adapter_digests:
            self.failed_adapters.setdefault(epoch, []).extend(commands.adapter_digests)
        if commands.drain:
            self._draining.add(epoch)

    def _refuse(self, submit: Request | Refusal, num_open: int) -> Refusal | None:
        running = self._scheduler.requests.get(submit.key)
        if running is not None:  # the two could not be told apart on the wire, so neither goes on
            self._scheduler.finish(running, FinishReason.ERROR)
            return Refusal(submit.key, f"request id {submit.key[1]} was used twice")
        if isinstance(submit, Refusal):
            return submit
        if self.is_ending or submit.key[0] in self._draining:
            return Refusal(submit.key, "the shard takes no more requests", retryable=True)
        if num_open >= self._max_open:
            return Refusal(submit.key, "more requests than credit", retryable=True)
        return None

    def _end(self, epoch: int) -> None:
        """A router is gone: nobody waits for its requests any more."""
        self.acknowledged.pop(epoch, None)
        self.failed_adapters.pop(epoch, None)
        self._draining.discard(epoch)
        for request in [request for key, request in self._scheduler.requests.items() if key[0] == epoch]:
            self._scheduler.finish(request, FinishReason.ABORTED)


def refused(refusal: Refusal) -> Output:
    """How a refusal is told."""
    return Output(refusal.key, finish_reason=FinishReason.ERROR, error=refusal.reason, retryable=refusal.retryable)
