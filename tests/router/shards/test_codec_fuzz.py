"""Random messages of shards: requests fail alone, each ends once, and the router continues."""

import asyncio

import orjson
from google.protobuf.message import DecodeError
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
from lorikeet.proto.params import LogprobParams, Method, Speculation
from lorikeet.router.api.answer_parts import speculation_report
from lorikeet.router.api.routes.native import token_event
from lorikeet.router.errors import RouterError
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import GenerationRequest
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router.text.vocabularies import byte_level
from tests.router.unwired import Unwired
from tests.shard.rig import Setup

TOKENIZER = Tokenizer(byte_level(), eos_ids=frozenset({3}))
VOCAB_SIZE = 400

huge = st.sampled_from([2**31, 2**32 - 1])
counts = st.one_of(st.integers(0, 9), huge)
token_ids = st.one_of(st.integers(0, VOCAB_SIZE - 1), huge)
numbers = st.one_of(st.floats(-9, 0, width=32), st.floats(width=32))
flags = st.one_of(st.binary(max_size=4), st.lists(st.sampled_from([0, 1]), max_size=4).map(bytes))
outputs = st.builds(
    pb.RequestOutput,
    token_ids=st.lists(token_ids, max_size=4),
    sources=flags,
    logprobs=st.lists(numbers, max_size=4),
    alternative_ids=st.lists(token_ids, max_size=8),
    alternative_logprobs=st.lists(numbers, max_size=8),
    num_drafted=st.lists(counts, max_size=4),
    num_accepted=counts,
    num_cached_tokens=counts,
    finish_reason=st.sampled_from([0] * 9 + [1, 2, 3, 4, 5, 77]),
    error=st.text(max_size=9),
    prefill_logprobs=st.lists(numbers, max_size=4),
    prefill_alternative_ids=st.lists(token_ids, max_size=8),
    prefill_alternative_logprobs=st.lists(numbers, max_size=8),
    prefill_ranks=st.lists(st.integers(0, 9), max_size=8),
    step_ends=flags,
    retryable=st.booleans(),
    in_step=st.booleans(),
    draft_seconds=numbers,
    verify_seconds=numbers,
    accept_seconds=numbers,
)
heads = st.builds(
    pb.StepOutput,
    step=st.one_of(st.integers(0, 50), st.just(2**64 - 1)),
    credit=st.one_of(
        st.none(), st.builds(pb.Credit, num_requests=counts, num_kv_tokens=counts, acknowledged=counts)
    ),
    heartbeat=st.one_of(st.none(), st.builds(pb.Heartbeat, running_step=counts, age_ms=counts)),
    adapters=st.lists(
        st.builds(pb.AdapterState, digest=st.text(max_size=5), residency=st.sampled_from([0, 1, 2, 3, 9])), max_size=2
    ),
    load=st.one_of(
        st.none(),
        st.builds(pb.Load, num_running=counts, num_waiting=counts, step_ms=counts, step_tokens=counts,
                  expected_ms=counts, num_preempted=counts, used_pages=counts),
    ),
    step_requests=st.one_of(st.none(), st.builds(pb.StepRequests, ids=st.lists(st.integers(0, 20), max_size=3))),
)  # fmt: skip


class ShardMessagesMachine(RuleBasedStateMachine):
    """One dispatcher, and two shards that say anything."""

    @initialize()
    def begin(self) -> None:
        self.fleet = Unwired(2, TOKENIZER, Setup(), lambda shard, ids: None)
        self.dispatcher = self.fleet.dispatcher
        self.all: list[Generation] = []
        self.ends: dict[int, int] = {}
        self.readers: list[asyncio.Task[None]] = []
        for index in range(2):
            self.comes_back(index)

    @precondition(lambda self: self.dispatcher.healthy)
    @rule(
        stop=st.sampled_from(["", "ab"]),
        num_alternatives=st.integers(0, 2),
        prefill=st.booleans(),
        num_drafts=st.integers(0, 3),
    )
    def ask(self, stop: str, num_alternatives: int, prefill: bool, num_drafts: int) -> None:
        request = GenerationRequest(
            [5, 6, 7],
            20,
            stop_strings=(stop,) if stop else (),
            logprobs=LogprobParams(
                wanted=True,
                alternatives=num_alternatives,
                prefill=prefill,
                prefill_alternatives=num_alternatives if prefill else 0,
            ),
            speculation=Speculation(Method.LOOKUP, num_drafts),
        )
        made = self.fleet.do(self.dispatcher.submit, request)
        self.all.append(made)
        self.readers.append(self.fleet.do(self.fleet.loop.create_task, self.read(made)))

    async def read(self, made: Generation) -> None:
        """As a route does; output that it cannot serialize ends only this request."""
        try:
            async for chunk in made:
                for token in chunk.tokens:
                    orjson.loads(token_event(token)[5:])
                if chunk.finish_reason is not None:
                    self.ends[made.routing.number] = self.ends.get(made.routing.number, 0) + 1
                    orjson.dumps(speculation_report([made]))
        except RouterError:
            self.ends[made.routing.number] = self.ends.get(made.routing.number, 0) + 1

    @rule(index=st.integers(0, 1), head=heads, parts=st.lists(st.tuples(st.integers(0, 8), outputs), max_size=4))
    def send(self, index: int, head: pb.StepOutput, parts: list[tuple[int, pb.RequestOutput]]) -> None:
        """Mostly for requests that run there; a request may occur twice."""
        link = self.dispatcher.links[index]
        if not link.client.connected:
            return
        wire_ids = [*link.running, 10**6]
        for choice, part in parts:
            part.id = wire_ids[choice % len(wire_ids)]
            head.outputs.append(part)
        self.fleet.do(self.dispatcher.on_output, link, head)
        self.fleet.do(self.dispatcher.delivery.wake_readers)

    @rule(
        index=st.integers(0, 1),
        head=heads,
        choices=st.lists(st.integers(0, 8), max_size=6),
        values=st.lists(st.integers(0, 60), max_size=6),
        num_alternatives=st.integers(0, 3),
        is_whole=st.booleans(),
    )
    def send_columns(
        self, index: int, head: pb.StepOutput, choices: list[int], values: list[int], num_alternatives: int,
        is_whole: bool,
    ) -> None:  # fmt: skip
        """Columns of equal lengths, or of others."""
        link = self.dispatcher.links[index]
        if not link.client.connected:
            return
        wire_ids = [*link.running, 10**6]
        ids = [wire_ids[choice % len(wire_ids)] for choice in choices]
        if is_whole:
            values = [*values, *[1] * len(ids)][: len(ids)]
        scores = [-0.5] * len(values)
        head.columns.add(
            ids=ids, token_ids=values, logprobs=scores, alternative_ids=values * num_alternatives,
            alternative_logprobs=scores * num_alternatives,
        )  # fmt: skip
        self.fleet.do(self.dispatcher.on_output, link, head)
        self.fleet.do(self.dispatcher.delivery.wake_readers)

    @rule(
        index=st.integers(0, 1),
        head=heads,
        part=outputs,
        changes=st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 255)), min_size=1),
    )
    def send_corrupted(
        self, index: int, head: pb.StepOutput, part: pb.RequestOutput, changes: list[tuple[int, int]]
    ) -> None:
        """A message with random bytes changed; gRPC rejects what cannot be parsed."""
        part.id = next(iter(self.dispatcher.links[index].running), 0)
        head.outputs.append(part)
        data = bytearray(head.SerializeToString())
        for place, value in changes:
            if data:
                data[place % len(data)] = value
        try:
            changed = pb.StepOutput.FromString(bytes(data))
        except DecodeError:
            return
        if self.dispatcher.links[index].client.connected:
            self.fleet.do(self.dispatcher.on_output, self.dispatcher.links[index], changed)
            self.fleet.do(self.dispatcher.delivery.wake_readers)

    @rule(index=st.integers(0, 1), is_taken_out=st.booleans())
    def ends_there(self, index: int, is_taken_out: bool) -> None:
        shard = self.fleet.shards[index]
        if shard.link.client.connected:
            self.fleet.do(shard.end, is_taken_out=is_taken_out)

    @rule(index=st.integers(0, 1))
    def comes_back(self, index: int) -> None:
        if not self.fleet.shards[index].link.client.connected:
            self.fleet.do(self.fleet.shards[index].start)

    @precondition(lambda self: self.all)
    @rule(choice=st.integers(0, 1000))
    def cancel(self, choice: int) -> None:
        self.fleet.do(self.all[choice % len(self.all)].cancel)

    @invariant()
    def every_request_has_one_owner_and_one_end(self) -> None:
        if not hasattr(self, "fleet"):
            return
        dispatcher = self.dispatcher
        for reader in self.readers:
            if reader.done():
                reader.result()
        living = {made.routing.number for made in self.all if not made.is_over}
        places = [
            *dispatcher._queued.values(),
            *(place for link in dispatcher.links for place in link.running.values()),
        ]
        assert sorted(place.routing.number for place in places) == sorted(living)
        assert self.ends == {made.routing.number: 1 for made in self.all if made.routing.number not in living}
        for link in dispatcher.links:
            assert link.num_by_affinity.total() == len(link.running)

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        try:
            b"".join(str(family).encode() for family in self.dispatcher.metrics.collect())
            self.fleet.do(self.dispatcher._fail_all, RouterError)
            self.every_request_has_one_owner_and_one_end()
            assert not self.dispatcher.num_active and not self.dispatcher.delivery.updated
            assert not any(made.timers for made in self.all)
        finally:
            self.fleet.close()


def test_random_messages_of_shards() -> None:
    run_state_machine_as_test(
        ShardMessagesMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )
