"""One shard as the dispatcher sees it: its stream, what runs on it, the room it has and the adapters it holds.

What is said on the stream goes to the owner; ids, credit and residency belong to one stream and begin anew with it.
"""

import itertools
import time
from typing import Protocol

from proto import shard_pb2 as pb
from router.credit import CreditAccount
from router.inflight import Generation, State
from router.pacing import Pacing
from router.residency import Residency
from router.shard_client import ShardClient

SILENT_SECONDS = 5.0
"""A shard that owes answers has a heartbeat; without one for so long it is not healthy."""


class LinkOwner(Protocol):
    """Who is told what happens on a link."""

    def link_up(self, link: "ShardLink") -> None:
        """A new stream is open."""

    def link_output(self, link: "ShardLink", output: pb.StepOutput) -> int:
        """One message; returns the number of requests with news to pass on."""

    def link_quiet(self) -> None:
        """No further message is at hand: pass the news on."""

    def link_down(self, link: "ShardLink", lost: list[Generation], reason: str) -> None:
        """The stream is gone, and with it the requests in `lost`."""


class ShardLink:
    """Keeps one stream to one shard."""

    def __init__(self, index: int, address: str, owner: LinkOwner) -> None:
        self.index = index
        self.address = address
        self.client = ShardClient(address, self)
        self.info: pb.ShardInfo | None = None
        """What the shard said about itself; None before the first connection."""
        self.running: dict[int, Generation] = {}
        """By the id on the wire."""
        self.credit = CreditAccount()
        self.pacing = Pacing()
        self.residency = Residency()
        self._owner = owner
        self._wire_ids = itertools.count(1)
        self._last_step = 0

    @property
    def ready(self) -> bool:
        """Whether a request could be sent."""
        return self.client.connected and self.client.serving and self.credit.known

    @property
    def healthy(self) -> bool:
        """Whether the shard is there and, while it owes answers, was heard lately."""
        return self.ready and (not self.running or time.monotonic() - self.client.last_heard < SILENT_SECONDS)

    def has_room(self, num_tokens: int) -> bool:
        """An idle shard gets a request whatever it says: it either runs it or says why it can't."""
        return self.ready and (self.credit.covers(num_tokens) or (not self.running and self.credit.num_unseen == 0))

    def take(self, generation: Generation, now: float) -> None:
        """The request runs here from now on."""
        generation.wire_id = next(self._wire_ids)
        generation.link = self
        generation.state = State.RUNNING
        generation.sent_at = now
        generation.is_mid_step = False
        self.running[generation.wire_id] = generation
        self.credit.sent(len(generation.request.prompt_ids))

    def abort(self, generation: Generation, now: float) -> bool:
        """End a request that runs here; whether it did."""
        if self.running.pop(generation.wire_id, None) is None:
            return False
        self.client.abort(generation.wire_id)
        if not self.running:
            self.pacing.became_idle(now)
        return True

    def ended(self, wire_id: int, now: float) -> None:
        """The request is over."""
        del self.running[wire_id]
        if not self.running:
            self.pacing.became_idle(now)

    def stepped(self, output: pb.StepOutput, now: float) -> bool:
        """Take what a message says of the shard as a whole; whether a step has ended since the last one."""
        if output.HasField("credit"):
            credit = output.credit
            self.credit.update(credit.num_requests, credit.num_kv_tokens, credit.acknowledged)
        if output.HasField("load"):
            self.pacing.step_takes(output.load.expected_ms / 1000)
        if output.step <= self._last_step:
            return False
        self._last_step = output.step
        self.pacing.step_began(now)
        return True

    # ShardListener

    def shard_up(self, info: pb.ShardInfo) -> None:
        self.info = info
        self.credit = CreditAccount()
        self.pacing = Pacing()
        self.residency = Residency()
        self._wire_ids = itertools.count(1)
        self._last_step = 0
        self._owner.link_up(self)

    def shard_output(self, output: pb.StepOutput) -> int:
        return self._owner.link_output(self, output)

    def shard_quiet(self) -> None:
        self._owner.link_quiet()

    def shard_down(self, reason: str) -> None:
        self.credit = CreditAccount()
        self.residency = Residency()
        self._owner.link_quiet()
        lost = list(self.running.values())
        self.running.clear()
        self._owner.link_down(self, lost, reason)
