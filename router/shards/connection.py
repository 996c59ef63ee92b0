"""One shard as the dispatcher sees it: its stream, the requests that run on it, its credit and its adapters.

Ids, credit and residency belong to one stream; each new one resets them.
"""

import asyncio
import itertools
from collections import Counter
from pathlib import Path

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.config import RouterConfig
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.affinity import AdapterResidency, PrefixIndex
from lorikeet.router.shards.client import ShardClient
from lorikeet.router.shards.credentials import ShardAccess
from lorikeet.router.shards.credit import CreditAccount
from lorikeet.router.shards.send_timing import SendTiming


class ShardLink:
    """Keeps one stream to one shard."""

    def __init__(self, index: int, address: str, name: str, access: ShardAccess, config: RouterConfig) -> None:
        """`name` is that of the certificate, where it is not the address's."""
        self.index = index
        self.address = address
        self.client = ShardClient(address, config.step_timeout_s, access, name)
        self.info: pb.ShardInfo | None = None
        """None before the first connection."""
        self.running: dict[int, Generation] = {}
        """Running requests by their id on the wire."""
        self.num_by_affinity: Counter[str] = Counter()
        """Number of running requests by their affinity key."""
        self._stuck_file = config.stuck_files[index] if index < len(config.stuck_files) else ""
        """Created to ask the process that started the shard to kill it, because it hangs."""
        self._reset(num_cached_tokens=0)

    def _reset(self, num_cached_tokens: int) -> None:
        self.credit = CreditAccount()
        self.send_timing = SendTiming()
        self.residency = AdapterResidency()
        self.prefixes = PrefixIndex(num_cached_tokens)
        self.step_requests: frozenset[int] = frozenset()
        """Wire ids of the requests that the current step computes, as far as was reported."""
        self.load: pb.Load | None = None
        """As last reported."""
        self.step_detail: pb.StepDetail | None = None
        """Details of a recent step, while `watch` asks for them."""
        self._wire_ids = itertools.count(1)
        self._last_step = 0
        self._has_steps = True
        self._digest: asyncio.Future[str] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no step runs there, as far as is known: nothing was sent, or all requests wait for adapters."""
        return not self.running or not (self._has_steps or self.credit.num_unseen)

    @property
    def ready(self) -> bool:
        """Whether a request could be sent."""
        return self.client.connected and self.client.serving and self.credit.known

    def has_room(self, num_tokens: int) -> bool:
        """An idle shard gets a request whatever its credit is: it either runs it or returns why it cannot."""
        return self.ready and (self.credit.covers(num_tokens) or (not self.running and self.credit.num_unseen == 0))

    def add(self, generation: Generation, now: float) -> None:
        """The request runs here from now on."""
        wire_id = next(self._wire_ids)
        generation.routing.place(self.address, wire_id, now)
        self.running[wire_id] = generation
        self.num_by_affinity[generation.adapters.affinity_key] += 1
        self.credit.sent(generation.num_known)

    def abort(self, generation: Generation, now: float) -> bool:
        """End a request that runs here; False for one that does not."""
        wire_id = generation.routing.wire_id
        if wire_id not in self.running:
            return False
        self.remove(wire_id, now)
        self.client.abort(wire_id)
        return True

    def remove(self, wire_id: int, now: float) -> None:
        """The request is over."""
        key = self.running.pop(wire_id).adapters.affinity_key
        self.num_by_affinity[key] -= 1
        if not self.num_by_affinity[key]:
            del self.num_by_affinity[key]
        if not self.running:
            self.send_timing.on_idle(now)

    def digest(self) -> "asyncio.Future[str]":
        """Digest of the files of the shard's model: requested once per stream, and kept after its end."""
        if self._digest is None:
            self._digest = asyncio.ensure_future(self.client.digest())
            self._digest.add_done_callback(self._on_digest)
        return self._digest

    def _on_digest(self, call: "asyncio.Future[str]") -> None:
        """One that failed is requested again."""
        if (call.cancelled() or call.exception() is not None) and self._digest is call:
            self._digest = None

    @property
    def known_digest(self) -> str:
        """The same, "" before it has arrived."""
        call = self._digest
        if call is None or not call.done() or call.cancelled() or call.exception() is not None:
            return ""
        return call.result()

    def watch(self, milliseconds: int) -> None:
        """Have the shard describe some of its steps for so long."""
        if self.client.connected:
            self.client.send(pb.Command(watch_ms=milliseconds))

    def update(self, output: pb.StepOutput, now: float) -> bool:
        """Take the shard's state from a message; True where a step has ended since the previous message."""
        if output.HasField("credit"):
            credit = output.credit
            self.credit.update(credit.num_requests, credit.num_kv_tokens, credit.acknowledged)
        if output.HasField("load"):
            self.send_timing.set_step_time(output.load.expected_ms / 1000)
            self._has_steps = output.load.num_running > 0
            self.load = output.load
        if output.HasField("step_requests"):
            self.step_requests = frozenset(output.step_requests.ids)
        if output.HasField("step_detail"):
            self.step_detail = output.step_detail
        if output.step <= self._last_step:
            return False
        self._last_step = output.step
        self.send_timing.on_step(now)
        return True

    def connect(self, info: pb.ShardInfo) -> None:
        """A new stream is open: ids and credit of earlier ones are void."""
        self.info = info
        self._reset(info.num_pages * info.page_size if info.prefix_caching else 0)

    def disconnect(self) -> list[Generation]:
        """The stream has ended. Returns the requests that ran on it, the first one sent first."""
        self.credit = CreditAccount()
        self.residency = AdapterResidency()
        if self.client.is_taken_out and self._stuck_file:
            Path(self._stuck_file).touch()
        lost = list(self.running.values())
        self.running.clear()
        self.num_by_affinity.clear()
        return lost
