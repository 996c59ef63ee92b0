"""One shard as the dispatcher sees it: its stream, what runs on it, the room it has and the adapters it holds.

What is said on the stream goes to the owner; ids, credit and residency belong to one stream and begin anew with it.
"""

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Protocol

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.requests.generation import Generation, State
from lorikeet.router.shards.adapter_residency import Residency
from lorikeet.router.shards.client import ShardClient
from lorikeet.router.shards.credentials import OPEN, ShardAccess
from lorikeet.router.shards.credit import CreditAccount
from lorikeet.router.shards.prefix_affinity import Prefixes
from lorikeet.router.shards.send_timing import Pacing


class LinkOwner(Protocol):
    """Who is told what happens on a link."""

    def link_incompatible(self, info: pb.ShardInfo) -> str:
        """Why such a shard cannot be used, in a sentence; empty if it can."""

    def link_serving(self) -> None:
        """Whether a shard takes requests has changed."""

    def link_up(self, link: "ShardLink") -> None:
        """A new stream is open."""

    def link_output(self, link: "ShardLink", output: pb.StepOutput) -> int:
        """One message; returns the number of requests with news to pass on."""

    def flush(self) -> None:
        """No further message is at hand: pass the news on."""

    def link_down(self, link: "ShardLink", lost: list[Generation], reason: str) -> None:
        """The stream is gone, and with it the requests in `lost`."""


class ShardLink:
    """Keeps one stream to one shard."""

    def __init__(
        self,
        index: int,
        address: str,
        owner: LinkOwner,
        step_timeout_s: float = 0.0,
        stuck_file: str = "",
        access: ShardAccess = OPEN,
        name: str = "",
    ) -> None:
        """`stuck_file`: a file that asks who started the shard to end it, since it hangs."""
        self.index = index
        self.address = address
        self.client = ShardClient(address, self, step_timeout_s, access, name)
        self.info: pb.ShardInfo | None = None
        """What the shard said about itself; None before the first connection."""
        self.running: dict[int, Generation] = {}
        """By the id on the wire."""
        self.num_of: Counter[str] = Counter()
        """Of these, by the digest that they were placed by."""
        self.credit = CreditAccount()
        self.pacing = Pacing()
        self.residency = Residency()
        self.prefixes = Prefixes(0)
        self.step_requests: frozenset[int] = frozenset()
        """By the id on the wire: whom the step at hand computes, as far as was heard."""
        self._owner = owner
        self._stuck_file = stuck_file
        self._wire_ids = itertools.count(1)
        self._last_step = 0
        self._steps = True
        self._digest: asyncio.Future[str] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no step runs there, as far as is known: nothing was sent, or all that was waits for adapters."""
        return not self.running or not (self._steps or self.credit.num_unseen)

    @property
    def ready(self) -> bool:
        """Whether a request could be sent."""
        return self.client.connected and self.client.serving and self.credit.known

    def has_room(self, num_tokens: int) -> bool:
        """An idle shard gets a request whatever it says: it either runs it or says why it can't."""
        return self.ready and (self.credit.covers(num_tokens) or (not self.running and self.credit.num_unseen == 0))

    def take(self, generation: Generation, now: float) -> None:
        """The request runs here from now on."""
        generation.wire_id = next(self._wire_ids)
        generation.link = self
        generation.state = State.RUNNING
        generation.sent_at = now if generation.sent_at is None else generation.sent_at
        generation.is_heard = False
        self.running[generation.wire_id] = generation
        self.num_of[generation.contents.home] += 1
        self.credit.sent(generation.num_known)

    def abort(self, generation: Generation, now: float) -> bool:
        """End a request that runs here; whether it did."""
        if generation.wire_id not in self.running:
            return False
        self.ended(generation.wire_id, now)
        self.client.abort(generation.wire_id)
        return True

    def ended(self, wire_id: int, now: float) -> None:
        """The request is over."""
        home = self.running.pop(wire_id).contents.home
        self.num_of[home] -= 1
        if not self.num_of[home]:
            del self.num_of[home]
        if not self.running:
            self.pacing.became_idle(now)

    def digest(self) -> "asyncio.Future[str]":
        """Of the files that its model was loaded from: asked for once on each stream, and known beyond its end."""
        if self._digest is None:
            self._digest = asyncio.ensure_future(self.client.digest())
            self._digest.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        return self._digest

    @property
    def known_digest(self) -> str:
        """The same, "" while nobody has been told."""
        asked = self._digest
        is_told = asked is not None and asked.done() and not asked.cancelled() and asked.exception() is None
        return asked.result() if asked is not None and is_told else ""

    def stepped(self, output: pb.StepOutput, now: float) -> bool:
        """Take what a message says of the shard as a whole; whether a step has ended since the last one."""
        if output.HasField("credit"):
            credit = output.credit
            self.credit.update(credit.num_requests, credit.num_kv_tokens, credit.acknowledged)
        if output.HasField("load"):
            self.pacing.step_takes(output.load.expected_ms / 1000)
            self._steps = output.load.num_running > 0
        if output.HasField("step_requests"):
            self.step_requests = frozenset(output.step_requests.ids)
        if output.step <= self._last_step:
            return False
        self._last_step = output.step
        self.pacing.step_began(now)
        return True

    # ShardListener

    def shard_incompatible(self, info: pb.ShardInfo) -> str:
        return self._owner.link_incompatible(info)

    def shard_serving(self) -> None:
        self._owner.link_serving()

    def shard_up(self, info: pb.ShardInfo) -> None:
        self.info = info
        self.credit = CreditAccount()
        self.pacing = Pacing()
        self.residency = Residency()
        self.prefixes = Prefixes(info.num_pages * info.page_size if info.prefix_caching else 0)
        self._wire_ids = itertools.count(1)
        self._last_step = 0
        self._steps = True
        self.step_requests = frozenset()
        self._digest = None
        self._owner.link_up(self)

    def shard_output(self, output: pb.StepOutput) -> int:
        return self._owner.link_output(self, output)

    def shard_quiet(self) -> None:
        self._owner.flush()

    def shard_down(self, reason: str) -> None:
        self.credit = CreditAccount()
        self.residency = Residency()
        self._owner.flush()
        if self.client.is_taken_out and self._stuck_file:
            Path(self._stuck_file).touch()
        lost = list(self.running.values())
        self.running.clear()
        self.num_of.clear()
        self._owner.link_down(self, lost, reason)
