"""Random crashes, hangs, rejections, failed steps and restarts of shards change no output."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

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
from lorikeet.proto.params import SamplingParams
from lorikeet.router.errors import DeadlineExceeded, GenerationFailed, NoShard, PoisonRequest, RouterError
from lorikeet.router.requests.generation import ISOLATION_STEPS, Generation
from lorikeet.router.requests.request import FinishReason, GenerationRequest
from lorikeet.router.shards.link import ShardLink
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router.text.vocabularies import byte_level
from tests.router.unwired import Died, Shard, Unwired
from tests.shard.fake_model import VOCAB_SIZE, generate_alone
from tests.shard.rig import Setup
from tests.shard.sampling.oracle import Case, excluded

EOS_IDS = frozenset({3, 17})
TOKENIZER = Tokenizer(byte_level(), eos_ids=EOS_IDS)
RECOVERY_S = 300.0
MASKED = SamplingParams(
    seed=1,
    allowed_ids=tuple(range(50)),
    bad_words=tuple((first, last) for first in range(50) for last in range(first % 4, 50, 4)),
)
LATE_END = SamplingParams(seed=1, min_tokens=6, min_tokens_stop_ids=(*sorted(EOS_IDS), 20, 30))
MOST_TURNS = 4000


@dataclass(eq=False)
class Submitted:
    """A request, its expected output, and the output that its reader got."""

    generation: Generation
    ids: list[int]
    """Expected, like text and reason."""
    text: str
    reason: FinishReason | None
    deadline: float | None = None
    validate: Callable[["Submitted"], None] = lambda submitted: None
    """Called once it has ended."""
    fault: str = ""
    """What a step that computes it does: `crashes` the shard, or `fails`."""
    got_ids: list[int] = field(default_factory=list)
    got_text: str = ""
    got: FinishReason | RouterError | None = None
    """How it ended."""
    num_crashes: int = 0
    """Crashes and failed steps with it in the last step that was started or reported."""
    last_alone: bool = False
    """Whether it was alone in the last of these steps."""
    must_try: bool = False
    """Whether it is a suspect that has not been sent again."""
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
        assert self.got is None, "output after the end"
        self.got = how
        if how is not None:
            self.validate(self)


def undisturbed(request: GenerationRequest) -> Submitted:
    """The request alone, token by token."""
    made = Generation(0, request, TOKENIZER)
    stop_ids = (frozenset[int]() if request.ignore_eos else EOS_IDS) | set(request.stop_token_ids)
    sampling = request.sampling
    case = Case(
        allowed_ids=sampling.allowed_ids,
        bad_words=sampling.bad_words,
        min_tokens=sampling.min_tokens,
        min_tokens_stop_ids=(*EOS_IDS, *request.stop_token_ids),
    )
    ids = generate_alone(
        request.prompt_ids, request.max_new_tokens, stop_ids, lambda output: excluded(case, output, VOCAB_SIZE)
    )
    for place, token_id in enumerate(ids, 1):
        output = pb.RequestOutput(token_ids=[token_id], sources=b"\1", step_ends=b"\1", logprobs=[0.0])
        if place == len(ids):
            output.finish_reason = pb.FINISH_EOS if token_id in stop_ids else pb.FINISH_LENGTH
        if not made.is_over:
            made.feed(output, 0.0)
    return Submitted(made, made.emitted_ids, made._text, made.finish_reason)


class ResumptionMachine(RuleBasedStateMachine):
    """One dispatcher with real engines that stop and start."""

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
        self.all: list[Submitted] = []
        self.readers: list[asyncio.Task[None]] = []
        self.none_since = self.fleet.clock.now
        self.fleet.do(self.shards[0].start)

    # Clients

    @precondition(lambda self: self.dispatcher.healthy)
    @rule(
        prompt=st.lists(st.integers(18, 60), min_size=1, max_size=9),
        num_tokens=st.integers(1, 25),
        stop=st.sampled_from(["", "", "5", "C9", "%&"]),
        include_stop=st.booleans(),
        seconds=st.sampled_from([None, None, None, 0.02, 5.0]),
        fault=st.sampled_from(["", "", "", "", "", "crashes", "fails"]),
        constraints=st.sampled_from([{}, {}, {"sampling": MASKED}, {"sampling": LATE_END, "stop_token_ids": (20, 30)}]),
    )
    def submit_one(
        self,
        prompt: list[int],
        num_tokens: int,
        stop: str,
        include_stop: bool,
        seconds: float | None,
        fault: str,
        constraints: dict[str, Any],
    ) -> None:
        stops = (stop,) if stop else ()
        fields = {"sampling": SamplingParams(seed=1), "stop_strings": stops, "include_stop": include_stop}
        request = GenerationRequest(prompt, num_tokens, **{**fields, **constraints})
        alone = undisturbed(request)
        deadline = None if seconds is None else self.fleet.clock.now + seconds
        made = self.fleet.do(self.submit, request, deadline)
        submitted = Submitted(made, alone.ids, alone.text, alone.reason, deadline, self.ended_rightly, fault)
        self.all.append(submitted)
        self.readers.append(self.fleet.do(self.fleet.loop.create_task, submitted.read()))

    def submit(self, request: GenerationRequest, deadline: float | None) -> Generation:
        return self.dispatcher.submit(request, deadline=deadline)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        submitted = data.draw(st.sampled_from(self.living))
        submitted.is_cancelled = True
        self.fleet.do(submitted.generation.cancel)

    @rule(seconds=st.sampled_from([0.01, 0.1, 4.0, RECOVERY_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.fleet.do(lambda: None, seconds=seconds)

    # Shards

    @rule(index=st.integers(0, 2), num_steps=st.integers(1, 6), is_delivered=st.booleans(), listens=st.booleans())
    def steps(self, index: int, num_steps: int, is_delivered: bool, listens: bool) -> None:
        """The output of some steps is not delivered, or no command is read."""
        shard = self.shards[index % len(self.shards)]
        for _ in range(num_steps):
            if shard.is_there:
                self.fleet.do(self.step, shard, listens)
            if shard.is_there and is_delivered:
                self.fleet.do(shard.say)

    def step(self, shard: Shard, listens: bool = True) -> None:
        """One step, which may crash the shard."""
        if listens:
            for submit in shard.listen():
                submitted = self.find(shard.link, submit.id)
                if submitted is not None and submitted.must_try:
                    assert submit.isolation_steps >= ISOLATION_STEPS, "a suspect is not isolated"
                    submitted.must_try = False
        try:
            shard.step()
        except Died:
            self.lose(shard)
        else:
            if shard.is_done:
                shard.say()
                self.lose(shard)

    def before_step(self, shard: Shard, ids: list[int]) -> None:
        running = [submitted for wire_id in ids if (submitted := self.find(shard.link, wire_id)) is not None]
        if any(submitted.fault == "crashes" for submitted in running):
            raise Died
        if any(submitted.fault == "fails" for submitted in running):
            self.count(shard, shard.begun)
            raise RuntimeError("a bad step")

    @precondition(lambda self: any(shard.is_there for shard in self.shards))
    @rule(index=st.integers(0, 2), is_taken_out=st.booleans())
    def ends(self, index: int, is_taken_out: bool) -> None:
        """It is killed, or its stream is closed because it sends nothing."""
        there = [shard for shard in self.shards if shard.is_there]
        self.fleet.do(self.lose, there[index % len(there)], is_taken_out)

    @rule(index=st.integers(0, 2), is_delivered=st.booleans())
    def shuts_down(self, index: int, is_delivered: bool) -> None:
        """It rejects new requests; the router may know that or not yet."""
        shard = self.shards[index % len(self.shards)]
        if shard.is_there:
            shard.drain()
            shard.link.client.serving = not is_delivered

    @rule(index=st.integers(0, 2))
    def comes_back(self, index: int) -> None:
        shard = self.shards[index % len(self.shards)]
        if not shard.is_there:
            self.fleet.do(shard.start)

    def lose(self, shard: Shard, is_taken_out: bool = False) -> None:
        self.count(shard, {*shard.begun, *shard.reported})
        was_ready = any(shard.link.ready for shard in self.shards)
        shard.end(is_taken_out=is_taken_out)
        if was_ready and not self.dispatcher.ready:
            self.none_since = self.fleet.clock.now

    def count(self, shard: Shard, wire_ids: Iterable[int]) -> None:
        """A step with these requests has failed."""
        for wire_id in wire_ids:
            submitted = self.find(shard.link, wire_id)
            if submitted is not None:
                submitted.num_crashes += 1
                submitted.last_alone = shard.begun == [wire_id]
                submitted.must_try = submitted.must_try or wire_id in shard.reported

    def find(self, link: ShardLink, wire_id: int) -> Submitted | None:
        """The request with that id, while the router has it."""
        generation = link.running.get(wire_id)
        return next((submitted for submitted in self.all if submitted.generation is generation), None)

    @property
    def living(self) -> list[Submitted]:
        return [submitted for submitted in self.all if not submitted.generation.is_over]

    # Invariants

    @invariant()
    def output_is_a_prefix_of_the_expected_one(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for reader in self.readers:
            if reader.done():
                reader.result()
        for submitted in self.all:
            made = submitted.generation
            assert made.emitted_ids == submitted.ids[: len(made.emitted_ids)]
            assert submitted.got_ids == made.emitted_ids[: len(submitted.got_ids)]
            assert (made.is_over) == (submitted.got is not None)

    def ended_rightly(self, submitted: Submitted) -> None:
        got = submitted.got
        if isinstance(got, FinishReason):
            assert (submitted.got_ids, submitted.got_text, got) == (submitted.ids, submitted.text, submitted.reason)
        elif isinstance(got, PoisonRequest):
            assert submitted.num_crashes >= 2 and submitted.last_alone
        elif isinstance(got, DeadlineExceeded):
            assert submitted.deadline is not None and self.fleet.clock.now >= submitted.deadline - 0.001
        elif isinstance(got, NoShard):
            assert self.fleet.clock.now - self.none_since >= RECOVERY_S
        elif not submitted.is_cancelled:
            assert isinstance(got, GenerationFailed) and "RuntimeError" in str(got)
            assert submitted.num_crashes >= 2 and submitted.last_alone

    @invariant()
    def every_request_has_one_owner(self) -> None:
        if not hasattr(self, "fleet"):
            return
        dispatcher = self.dispatcher
        places = [
            *dispatcher._queued.values(),
            *(place for link in dispatcher.links for place in link.running.values()),
        ]
        assert {id(place) for place in places} == {id(submitted.generation) for submitted in self.living}
        assert len(places) == len(self.living) == dispatcher.num_active
        assert len(dispatcher.queue) == len(dispatcher._queued)
        for link in dispatcher.links:
            assert all(
                (submitted.routing.shard_address, submitted.routing.wire_id) == (link.address, wire_id)
                for wire_id, submitted in link.running.items()
            )
            assert link.num_by_affinity.total() == len(link.running)
            assert link.client.connected or not link.running

    def teardown(self) -> None:
        """Shards restart repeatedly: requests that crash them fail, and all others are answered."""
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
                self.output_is_a_prefix_of_the_expected_one()
                self.every_request_has_one_owner()
            assert not self.living
            self.clean()
        finally:
            self.fleet.close()

    def clean(self) -> None:
        assert all(reader.done() for reader in self.readers)
        assert not any(submitted.generation.timers for submitted in self.all)
        assert not self.dispatcher.delivery.updated and not len(self.dispatcher.queue)
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
