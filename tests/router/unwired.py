"""The router's dispatcher and real engines with the fake model, connected by messages that the test transfers.

No socket, no thread, and a clock that the test moves: a shard can crash during a step, with output that is not yet
sent or not yet received.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch import dispatcher
from lorikeet.router.dispatch.dispatcher import Dispatcher, ShardStream
from lorikeet.router.requests import generation
from lorikeet.router.shards.link import ShardLink
from lorikeet.router.text.tokenizer import Tokenizer
from lorikeet.shard.engine import engine as shard_engine
from lorikeet.shard.grpc import codec as shard_codec
from lorikeet.shard.grpc.codec import Bounds, read_command, write_update
from lorikeet.shard.grpc.streams import Outbox
from lorikeet.shard.requests.request import ScheduledRequest
from lorikeet.shard.system.timing import PhaseTimer
from tests.shard.fake_model import VOCAB_SIZE
from tests.shard.rig import EPOCH, Rig, Setup

CLOCKED: tuple[ModuleType, ...] = (dispatcher, generation, shard_engine, shard_codec)
TURNS = 6
"""Iterations of the loop after which nothing is left to run at the same time."""


class Died(BaseException):
    """The process has crashed: nothing handles this."""


class Clock:
    """Replaces the module `time` in CLOCKED."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Loop(asyncio.SelectorEventLoop):
    """Its timers use that clock."""

    def __init__(self, clock: Clock) -> None:
        self._test_clock = clock
        super().__init__()

    def time(self) -> float:
        return self._test_clock.now


class Post(Outbox):
    """Sends pending output where the shard waits for it to be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.send: Callable[[], None] = lambda: None

    def announce_step(self, keys: Iterable[tuple[int, int]], wait_s: float = 0.0) -> None:
        super().announce_step(keys)
        if wait_s:
            self.send()


class Shard:
    """A shard that can be restarted, and the link to it."""

    def __init__(
        self, dispatcher: Dispatcher, link: ShardLink, setup: Setup, before_step: Callable[["Shard", list[int]], None]
    ) -> None:
        """`before_step` is called with the wire ids of a step, and may raise."""
        self.link = link
        self.stream = ShardStream(dispatcher, link)
        self.rig: Rig | None = None
        """None while it does not run."""
        self.begun: list[int] = []
        """Wire ids of the requests of its last step."""
        self.reported: list[int] = []
        """The same, as last reported to the router."""
        self._setup = setup
        self._before_step = before_step

    @property
    def is_there(self) -> bool:
        return self.rig is not None

    def start(self) -> None:
        post = Post()
        post.send = self.say
        self.rig = Rig(self._setup, post)
        forward = self.rig.engine._forward

        def checked_forward(scheduled: list[ScheduledRequest], timer: PhaseTimer) -> Any:
            self.begun = [item.request.key[1] for item in scheduled]
            self._before_step(self, self.begun)
            return forward(scheduled, timer)

        self.rig.engine._forward = checked_forward  # type: ignore[method-assign]
        self.begun, self.reported = [], []
        client, setup = self.link.client, self._setup
        client._outbox.clear()
        client.connected = client.serving = True
        client.is_taken_out = False
        self.stream.on_connect(pb.ShardInfo(num_pages=setup.num_pages, page_size=setup.page_size, prefix_caching=True))
        self.rig.engine.step()
        self.say()

    def end(self, *, is_taken_out: bool = False) -> None:
        """Output that was not sent is lost, and commands that were not read."""
        self.rig = None
        self.link.client.connected = self.link.client.serving = False
        self.link.client.is_taken_out = is_taken_out
        self.stream.on_disconnect("gone")

    def drain(self) -> None:
        """Shut down: running requests finish, new ones are rejected."""
        assert self.rig is not None
        self.rig.engine.stop()

    @property
    def is_done(self) -> bool:
        """Whether it shuts down and has no requests left."""
        assert self.rig is not None
        return self.rig.engine._intake.is_ending and self.rig.scheduler.is_idle

    def listen(self) -> list[pb.Submit]:
        """Read all commands of the router."""
        assert self.rig is not None
        cache = self.rig.scheduler.cache
        bounds = Bounds(VOCAB_SIZE, 600, cache.num_pages * cache.page_size)
        submits: list[pb.Submit] = []
        while self.link.client._outbox:
            command, _ = self.link.client._outbox.popleft()
            submits += command.submits
            self.rig.inbox.put(read_command(EPOCH, pb.Command.FromString(command.SerializeToString()), bounds))
        return submits

    def step(self) -> None:
        """Raises Died where the step crashes the process."""
        assert self.rig is not None
        self.rig.engine.step()

    def say(self) -> None:
        """Send all pending output."""
        assert self.rig is not None
        update = self.rig.outbox.take(EPOCH)
        if update.step_requests is not None:
            self.reported = update.step_requests
        messages = write_update(update, pb.Heartbeat())
        self.stream.on_outputs([pb.StepOutput.FromString(message.SerializeToString()) for message in messages])
        self.rig.outbox.sent(EPOCH, update)


class Unwired:
    """A dispatcher, its shards, and the loop that it runs in."""

    def __init__(
        self, num_shards: int, tokenizer: Tokenizer, setup: Setup, before_step: Callable[[Shard, list[int]], None]
    ) -> None:
        self._quiet = ExitStack()
        self._quiet.enter_context(structlog.testing.capture_logs())
        self.clock = Clock()
        self._times = {module: module.time for module in CLOCKED}
        for module in CLOCKED:
            module.time = self.clock  # type: ignore[attr-defined]
        self.loop = Loop(self.clock)
        addresses = tuple(f"unix:nowhere-{index}" for index in range(num_shards))
        self.dispatcher = Dispatcher(RouterConfig("model", ".", addresses), tokenizer)
        self.shards = [Shard(self.dispatcher, link, setup, before_step) for link in self.dispatcher.links]

    def do(self, what: Callable[..., Any], *arguments: Any, seconds: float = 0.001, **words: Any) -> Any:
        """Call within the loop, advance the clock, and run all callbacks that are due."""

        async def doing() -> Any:
            result = what(*arguments, **words)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self.clock.now += seconds
            for _ in range(TURNS):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(doing())

    def close(self) -> None:
        self._quiet.close()
        self.loop.close()
        for module, time in self._times.items():
            module.time = time  # type: ignore[attr-defined]
