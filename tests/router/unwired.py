"""The router's dispatcher and real engines around the fake model, joined by messages that tests carry by hand.

No socket, no thread, and a clock that moves when it is told to: a shard can end in the midst of a step, with words
said, not yet said, and not yet heard.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch import dispatcher as dispatch
from lorikeet.router.dispatch import send_loop as send_loop
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.requests import deadlines
from lorikeet.router.requests import generation as generation
from lorikeet.router.shards import client as shard_client
from lorikeet.router.shards.connection import ShardLink
from lorikeet.router.text.tokenizer import Tokenizer
from lorikeet.shard.engine import engine as shard_engine
from lorikeet.shard.grpc import codec as shard_codec
from lorikeet.shard.grpc.codec import Bounds, read_command, write_update
from lorikeet.shard.grpc.outbox import Outbox
from lorikeet.shard.scheduler.scheduled_request import ScheduledRequest
from tests.shard.fake_model import VOCAB_SIZE
from tests.shard.rig import EPOCH, Rig, Setup

CLOCKED: tuple[ModuleType, ...] = (deadlines, dispatch, generation, send_loop, shard_client, shard_engine, shard_codec)
TURNS = 6
"""Of the loop, after which nothing is left to do at the same moment."""


class Died(BaseException):
    """The process is gone: nobody handles that."""


class Clock:
    """What those modules take for `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Loop(asyncio.SelectorEventLoop):
    """Its timers go by that clock."""

    def __init__(self, clock: Clock) -> None:
        self._test_clock = clock
        super().__init__()

    def time(self) -> float:
        return self._test_clock.now


class Post(Outbox):
    """What waits to be heard goes out where the shard insists on it."""

    def __init__(self) -> None:
        super().__init__()
        self.send: Callable[[], None] = lambda: None

    def announce_step(self, keys: Iterable[tuple[int, int]], wait_s: float = 0.0) -> None:
        super().announce_step(keys)
        if wait_s:
            self.send()


class Shard:
    """One life after another of a shard, and the link to it."""

    def __init__(self, link: ShardLink, setup: Setup, before_step: Callable[["Shard", list[int]], None]) -> None:
        """`before_step` is told whom a step computes, and may raise."""
        self.link = link
        self.rig: Rig | None = None
        """None while it is gone."""
        self.begun: list[int] = []
        """By the id on the wire: whom its newest step computes."""
        self.heard: list[int] = []
        """The same, as far as the router was told."""
        self._setup = setup
        self._before_step = before_step

    @property
    def is_there(self) -> bool:
        return self.rig is not None

    def start(self) -> None:
        post = Post()
        post.send = self.say
        self.rig = Rig(self._setup, post)
        forward = self.rig.model.forward

        def perilous() -> Any:
            self.begun = [share.request.key[1] for share in self._shares()]
            self._before_step(self, self.begun)
            return forward()

        self.rig.model.forward = perilous  # type: ignore[method-assign]
        self.begun, self.heard = [], []
        client, setup = self.link.client, self._setup
        client._outbox.clear()
        client.connected = client.serving = True
        client.is_taken_out = False
        self.link.shard_up(pb.ShardInfo(num_pages=setup.num_pages, page_size=setup.page_size, prefix_caching=True))
        self.rig.engine.step()
        self.say()

    def end(self, *, is_taken_out: bool = False) -> None:
        """What it has not said is lost, and what it has not read."""
        self.rig = None
        self.link.client.connected = self.link.client.serving = False
        self.link.client.is_taken_out = is_taken_out
        self.link.shard_down("gone")

    def drain(self) -> None:
        """Be told to end: what runs is finished, what is new refused."""
        assert self.rig is not None
        self.rig.engine.stop()

    @property
    def is_done(self) -> bool:
        """Whether it was told to end, and has nothing left to do."""
        assert self.rig is not None
        return self.rig.engine._intake.is_ending and self.rig.scheduler.is_idle

    def listen(self) -> list[pb.Submit]:
        """Read all that the router has sent."""
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
        """Raises Died where the step ends the process."""
        assert self.rig is not None
        self.rig.engine.step()

    def say(self) -> None:
        """Send all that the router has not been told."""
        assert self.rig is not None
        update = self.rig.outbox.take(EPOCH)
        if update.step_requests is not None:
            self.heard = update.step_requests
        for message in write_update(update, pb.Heartbeat()):
            self.link.shard_output(pb.StepOutput.FromString(message.SerializeToString()))
        self.rig.outbox.sent(EPOCH, update)
        self.link.shard_quiet()

    def _shares(self) -> list[ScheduledRequest]:
        assert self.rig is not None
        return self.rig.engine._launched[-1].scheduled


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
        self.shards = [Shard(link, setup, before_step) for link in self.dispatcher.links]

    def do(self, what: Callable[..., Any], *arguments: Any, seconds: float = 0.001, **words: Any) -> Any:
        """Call within the loop, let so much time pass, and let everything settle."""

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
