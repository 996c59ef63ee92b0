"""Any sequence of ends, halts, refusals, failed steps and returns of shards: every text is what it is undisturbed."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from unittest.mock import Mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.errors import DeadlineExceeded, GenerationFailed, NoShard, PoisonRequest, RouterError
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.routing import ISOLATION_STEPS
from lorikeet.router.requests.types import FinishReason, GenerationRequest
from lorikeet.router.shards.connection import ShardLink
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router.text.vocabularies import byte_level
from tests.router.unwired import Died, Shard, Unwired
from tests.shard.fake_model import generate_alone
from tests.shard.rig import Setup

EOS_IDS = frozenset({3, 17})
TOKENIZER = Tokenizer(byte_level(), eos_ids=EOS_IDS)
RECOVERY_S = 300.0
MOST_TURNS = 4000


@dataclass(eq=False)
class Asked:
    """A request, what it must give, and what its reader got."""

    generation: Generation
    ids: list[int]
    """Undisturbed; so are text and reason."""
    text: str
    reason: FinishReason | None
    deadline: float | None = None
    validate: Callable[["Asked"], None] = lambda asked: None
    """Called once it has ended."""
    peril: str = ""
    """What a step that computes it does: `ends` the shard, or `fails`."""
    got_ids: list[int] = field(default_factory=list)
    got_text: str = ""
    got: FinishReason | RouterError | None = None
    """How it ended."""
    num_crashes: int = 0
    """Shards that ended, and steps that failed, with it in the last step that was begun or heard of."""
    last_alone: bool = False
    """Whether it was alone in the step of the newest of these."""
    must_try: bool = False
    """Whether it is a suspect that was not sent since."""
    is_cancelled: bool = False

    async def read(self) -> None:
        try:
            async for chunk in self.generation:
                self.got_ids += [token.id for token in chunk.tokens]
                self.got_text += chunk.text
                self._end(chunk.finish_reason)
        except RouterError as error:
            self._end(error)

    def _end(self, how: FinishReason | RouterError | None) -> None:
        assert self.got is None, "something follows the end"
        self.got = how
        if how is not None:
            self.validate(self)


def undisturbed(request: GenerationRequest) -> Asked:
    """The request by itself, one token after the other."""
    made = Generation(0, request, TOKENIZER, Mock())
    stop_ids = frozenset[int]() if request.ignore_eos else EOS_IDS
    ids = generate_alone(request.prompt_ids, request.max_new_tokens, stop_ids)
    for place, token_id in enumerate(ids, 1):
        output = pb.RequestOutput(token_ids=[token_id], sources=b"\1", step_ends=b"\1", logprobs=[0.0])
        if place == len(ids):
            output.finish_reason = pb.FINISH_EOS if token_id in stop_ids else pb.FINISH_LENGTH
        if not made.is_over:
            made.feed(output, 0.0)
    return Asked(made, made.emitted_ids, made._text, made.finish_reason)


class ResumptionMachine(RuleBasedStateMachine):
    """One dispatcher over real engines that come and go."""

    @initialize(
        num_shards=st.integers(1, 3),
        max_running=st.integers(1, 4),
        commit_lag=st.integers(0, 1),
        step_tokens=st.sampled_from([3, 64]),
    )
    def begin(self, num_shards: int, max_running: int, commit_lag: int, step_tokens: int) -> None:
        setup = Setup(60, 4, step_tokens, max_running, max_waiting=4, commit_lag=commit_lag)
        self.fleet = Unwired(num_shards, TOKENIZER, setup, self.before_step)
        self.dispatcher, self.shards = self.fleet.dispatcher, self.fleet.shards
        self.all: list[Asked] = []
        self.readers: list[asyncio.Task[None]] = []
        self.none_since = self.fleet.clock.now
        self.fleet.do(self.shards[0].start)

    # What clients do

    @precondition(lambda self: self.dispatcher.healthy)
    @rule(
        prompt=st.lists(st.integers(18, 60), min_size=1, max_size=9),
        num_tokens=st.integers(1, 25),
        stop=st.sampled_from(["", "", "5", "C9", "%&"]),
        include_stop=st.booleans(),
        seconds=st.sampled_from([None, None, None, 0.02, 5.0]),
        peril=st.sampled_from(["", "", "", "", "", "ends", "fails"]),
    )
    def ask(
        self, prompt: list[int], num_tokens: int, stop: str, include_stop: bool, seconds: float | None, peril: str
    ) -> None:
        request = GenerationRequest(
            prompt, num_tokens, 1, stop_strings=(stop,) if stop else (), include_stop=include_stop
        )
        alone = undisturbed(request)
        deadline = None if seconds is None else self.fleet.clock.now + seconds
        made = self.fleet.do(self.submit, request, deadline)
        asked = Asked(made, alone.ids, alone.text, alone.reason, deadline, self.ended_rightly, peril)
        self.all.append(asked)
        self.readers.append(self.fleet.do(self.fleet.loop.create_task, asked.read()))

    def submit(self, request: GenerationRequest, deadline: float | None) -> Generation:
        return self.dispatcher.submit(request, deadline=deadline)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.living))
        asked.is_cancelled = True
        self.fleet.do(asked.generation.cancel)

    @rule(seconds=st.sampled_from([0.01, 0.1, 4.0, RECOVERY_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.fleet.do(lambda: None, seconds=seconds)

    # What shards do

    @rule(index=st.integers(0, 2), num_steps=st.integers(1, 6), is_heard=st.booleans(), listens=st.booleans())
    def steps(self, index: int, num_steps: int, is_heard: bool, listens: bool) -> None:
        """Now and then nothing of a few steps is heard, or nothing new is read."""
        shard = self.shards[index % len(self.shards)]
        for _ in range(num_steps):
            if shard.is_there:
                self.fleet.do(self.step, shard, listens)
            if shard.is_there and is_heard:
                self.fleet.do(shard.say)

    def step(self, shard: Shard, listens: bool = True) -> None:
        """One step, which may be the last."""
        if listens:
            for submit in shard.listen():
                asked = self.asked(shard.link, submit.id)
                if asked is not None and asked.must_try:
                    assert submit.isolation_steps >= ISOLATION_STEPS, "a suspect without a trial"
                    asked.must_try = False
        try:
            shard.step()
        except Died:
            self.lose(shard)
        else:
            if shard.is_done:
                shard.say()
                self.lose(shard)

    def before_step(self, shard: Shard, ids: list[int]) -> None:
        found = [asked for wire_id in ids if (asked := self.asked(shard.link, wire_id)) is not None]
        if any(asked.peril == "ends" for asked in found):
            raise Died
        if any(asked.peril == "fails" for asked in found):
            self.count(shard, shard.begun)
            raise RuntimeError("a bad step")

    @precondition(lambda self: any(shard.is_there for shard in self.shards))
    @rule(index=st.integers(0, 2), is_taken_out=st.booleans())
    def ends(self, index: int, is_taken_out: bool) -> None:
        """Killed, or taken out because it says nothing any more."""
        there = [shard for shard in self.shards if shard.is_there]
        self.fleet.do(self.lose, there[index % len(there)], is_taken_out)

    @rule(index=st.integers(0, 2), is_heard=st.booleans())
    def is_told_to_end(self, index: int, is_heard: bool) -> None:
        """It refuses what is new; the router may have heard of that, or not yet."""
        shard = self.shards[index % len(self.shards)]
        if shard.is_there:
            shard.drain()
            shard.link.client.serving = not is_heard

    @rule(index=st.integers(0, 2))
    def comes_back(self, index: int) -> None:
        shard = self.shards[index % len(self.shards)]
        if not shard.is_there:
            self.fleet.do(shard.start)

    def lose(self, shard: Shard, is_taken_out: bool = False) -> None:
        self.count(shard, {*shard.begun, *shard.heard})
        was_ready = any(each.link.ready for each in self.shards)
        shard.end(is_taken_out=is_taken_out)
        if was_ready and not self.dispatcher.ready:
            self.none_since = self.fleet.clock.now

    def count(self, shard: Shard, wire_ids: Iterable[int]) -> None:
        """A step has gone wrong for these."""
        for wire_id in wire_ids:
            asked = self.asked(shard.link, wire_id)
            if asked is not None:
                asked.num_crashes += 1
                asked.last_alone = shard.begun == [wire_id]
                asked.must_try = asked.must_try or wire_id in shard.heard

    def asked(self, link: ShardLink, wire_id: int) -> Asked | None:
        """Whose that id is, while the router knows it."""
        generation = link.running.get(wire_id)
        return next((asked for asked in self.all if asked.generation is generation), None)

    @property
    def living(self) -> list[Asked]:
        return [asked for asked in self.all if not asked.generation.is_over]

    # What holds

    @invariant()
    def nothing_is_lost_or_twice(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for reader in self.readers:
            if reader.done():
                reader.result()
        for asked in self.all:
            made = asked.generation
            assert made.emitted_ids == asked.ids[: len(made.emitted_ids)]
            assert asked.got_ids == made.emitted_ids[: len(asked.got_ids)]
            assert (made.is_over) == (asked.got is not None)

    def ended_rightly(self, asked: Asked) -> None:
        got = asked.got
        if isinstance(got, FinishReason):
            assert (asked.got_ids, asked.got_text, got) == (asked.ids, asked.text, asked.reason)
        elif isinstance(got, PoisonRequest):
            assert asked.num_crashes >= 2 and asked.last_alone
        elif isinstance(got, DeadlineExceeded):
            assert asked.deadline is not None and self.fleet.clock.now >= asked.deadline - 0.001
        elif isinstance(got, NoShard):
            assert self.fleet.clock.now - self.none_since >= RECOVERY_S
        elif not asked.is_cancelled:
            assert isinstance(got, GenerationFailed) and "RuntimeError" in str(got)
            assert asked.num_crashes >= 2 and asked.last_alone

    @invariant()
    def each_is_in_one_place(self) -> None:
        if not hasattr(self, "fleet"):
            return
        dispatcher = self.dispatcher
        places = [*dispatcher._queued.values(), *(each for link in dispatcher.links for each in link.running.values())]
        assert {id(each) for each in places} == {id(asked.generation) for asked in self.living}
        assert len(places) == len(self.living) == dispatcher.num_active
        assert len(dispatcher._queue) == len(dispatcher._queued)
        for link in dispatcher.links:
            assert all(
                (each.routing.shard_address, each.routing.wire_id) == (link.address, wire_id)
                for wire_id, each in link.running.items()
            )
            assert link.num_by_affinity.total() == len(link.running)
            assert link.client.connected or not link.running

    def teardown(self) -> None:
        """Shards come back again and again: whoever ends them is refused, and everyone else is answered."""
        if not hasattr(self, "fleet"):
            return
        try:
            for _ in range(MOST_TURNS):
                if not self.living:
                    break
                for shard in self.shards:
                    if not shard.is_there:
                        self.fleet.do(shard.start)
                    self.fleet.do(self.step, shard, seconds=0.005)
                    if shard.is_there:
                        self.fleet.do(shard.say)
                self.nothing_is_lost_or_twice()
                self.each_is_in_one_place()
            assert not self.living
            self.clean()
        finally:
            self.fleet.close()

    def clean(self) -> None:
        assert all(reader.done() for reader in self.readers)
        assert not any(asked.generation.timers for asked in self.all)
        assert not self.dispatcher._delivery.num_updated and not len(self.dispatcher._queue)
        for shard in self.shards:
            for _ in range(2):
                if shard.is_there:
                    self.fleet.do(self.step, shard)
            if shard.is_there:
                assert shard.rig is not None
                shard.rig.assert_clean()


def test_random_lives_of_shards() -> None:
    run_state_machine_as_test(
        ResumptionMachine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )
