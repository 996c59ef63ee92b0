"""Whatever a router sends, the loop continues, each submitted id gets one end, and nothing leaks."""

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
from lorikeet.proto.params import Method, Schedule, Verification
from lorikeet.shard.grpc.codec import Bounds, read_command
from lorikeet.shard.grpc.streams import AdapterRead
from lorikeet.shard.scheduler.adapter_slots import AdapterSlots, SlotLimits
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.fake_model import VOCAB_SIZE, DraftModel
from tests.shard.grpc.test_adapter_events import Device, Weights
from tests.shard.rig import EPOCH, Rig, Setup

DIGESTS = [character * 64 for character in "abc"]
MOST_STEPS = 3000

ids = st.one_of(st.integers(0, 9), st.sampled_from([2**32, 2**63, 2**64 - 1]))
counts = st.one_of(st.integers(0, 12), st.sampled_from([255, 2**31, 2**32 - 1]))
few = st.one_of(st.just(0), st.integers(0, 12), counts)
token_ids = st.one_of(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([VOCAB_SIZE, 2**32 - 1]))
good_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)
numbers = st.one_of(st.floats(0, 2, width=32), st.floats(width=32), st.sampled_from([1e-45, 3.4e38, -3.4e38]))
texts = st.one_of(st.sampled_from(["", "", *DIGESTS]), st.text(max_size=70))
adapters = st.builds(pb.AdapterPin, source=texts, id=texts, revision=texts, digest=texts)


def mostly(good: object, bad: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Valid values more often than not, so that faults come one by one."""
    return st.one_of(*[good if isinstance(good, st.SearchStrategy) else st.just(good)] * 5, bad)


samplings = st.builds(
    pb.Sampling,
    do_sample=st.booleans(),
    temperature=mostly(1, numbers),
    top_k=mostly(0, counts),
    top_p=mostly(1, numbers),
    min_p=mostly(0, numbers),
    typical_p=mostly(1, numbers),
    repetition_penalty=mostly(1, numbers),
    frequency_penalty=mostly(0, numbers),
    presence_penalty=mostly(0, numbers),
    bias_ids=mostly([], st.lists(token_ids, max_size=3)),
    bias_values=mostly([], st.lists(numbers, max_size=3)),
    watermark=st.booleans(),
    allowed_ids=mostly([], st.lists(token_ids, max_size=3)),
    bad_words=mostly([], st.lists(st.builds(pb.TokenSequence, token_ids=st.lists(token_ids, max_size=70)), max_size=3)),
    min_tokens=few,
    min_tokens_stop_ids=mostly([], st.lists(token_ids, max_size=3)),
)
speculations = st.builds(
    pb.Speculation,
    method=st.one_of(st.sampled_from(["", *map(str, Method)]), texts),
    num_tokens=few,
    schedule=mostly("", st.one_of(st.sampled_from([*map(str, Schedule)]), texts)),
    verify=mostly("", st.one_of(st.sampled_from([*map(str, Verification)]), texts)),
    num_heads=few,
)
submits = st.builds(
    pb.Submit,
    id=ids,
    prompt_ids=mostly(good_ids, st.lists(token_ids, max_size=6)),
    num_emitted=mostly(0, counts),
    max_new_tokens=mostly(st.integers(1, 9), counts),
    seed=st.one_of(st.integers(0, 2**64 - 1), st.just(2**64 - 1)),
    sampling=samplings,
    stop_ids=mostly([], st.lists(token_ids, max_size=4)),
    adapter=mostly(None, adapters),
    heads=mostly(None, adapters),
    speculation=mostly(None, speculations),
    prediction_ids=mostly([], st.lists(token_ids, max_size=9)),
    deadline_ms=mostly(0, counts),
    logprobs=st.builds(
        pb.Logprobs,
        wanted=st.booleans(),
        alternatives=mostly(0, counts),
        prefill=st.booleans(),
        mode=st.sampled_from([0, 1]),
        prefill_alternatives=mostly(0, counts),
    ),
    cache_salt=texts,
    isolation_steps=mostly(0, counts),
)
commands = st.builds(
    pb.Command,
    submits=st.lists(submits, max_size=4),
    abort_ids=st.lists(ids, max_size=3),
    pins=mostly([], st.lists(st.builds(pb.Pin, digest=texts, pinned=st.booleans()), max_size=2)),
    prefetches=mostly([], st.lists(adapters, max_size=2)),
    unload_digests=mostly([], st.lists(texts, max_size=2)),
)


class WireMachine(RuleBasedStateMachine):
    """One stream of a shard that has adapters and a draft model."""

    @initialize(lag=st.integers(0, 1), num_pages=st.integers(4, 60), max_running=st.integers(1, 5))
    def begin(self, lag: int, num_pages: int, max_running: int) -> None:
        draft_sources = DraftSettings(has_draft_model=True)
        draft = DraftModel(0.7)
        self.rig = Rig(Setup(num_pages, 4, 16, max_running, 4, commit_lag=lag, drafts=draft_sources, draft=draft))
        self.requested: list[str] = []
        self.rig.scheduler.adapters = AdapterSlots(SlotLimits(2, 100, 100), Device(), self.requested.append)
        self.bounds = Bounds(VOCAB_SIZE, 600, 4 * num_pages, has_adapters=True, has_draft_model=True)
        self.num_submits: dict[int, int] = {}
        self.num_ends: dict[int, int] = {}
        self.last_step = 0

    @rule(command=commands)
    def send(self, command: pb.Command) -> None:
        for submit in command.submits:
            self.num_submits[submit.id] = self.num_submits.get(submit.id, 0) + 1
        self.rig.inbox.put(read_command(EPOCH, command, self.bounds))

    @rule(command=commands, changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1))
    def send_changed_bytes(self, command: pb.Command, changes: list[tuple[int, int]]) -> None:
        """A command with changed bytes; gRPC rejects what is not a message at all."""
        data = bytearray(command.SerializeToString())
        for place, value in changes:
            if data:
                data[place % len(data)] = value
        try:
            changed = pb.Command.FromString(bytes(data))
        except DecodeError:
            return
        self.send(changed)

    @rule(num_steps=st.integers(1, 6), is_taken=st.booleans())
    def step(self, num_steps: int, is_taken: bool) -> None:
        for _ in range(num_steps):
            self.rig.engine.step()
        if is_taken:
            self.take()

    @precondition(lambda self: self.requested)
    @rule(num_bytes=st.integers(1, 120), fails=st.booleans())
    def read(self, num_bytes: int, fails: bool) -> None:
        content = None if fails else Weights(num_bytes)
        self.rig.inbox.put(AdapterRead(self.requested.pop(0), content, "broken" if fails else ""))

    def take(self) -> None:
        update = self.rig.outbox.take(EPOCH)
        self.rig.outbox.sent(EPOCH, update)
        assert update.acknowledged <= sum(self.num_submits.values())
        for output in update.request_outputs():
            request_id = output.key[1]
            assert len(output.token_ids) == len(output.sources) == len(output.step_ends)
            assert self.num_ends.get(request_id, 0) < self.num_submits[request_id], "an output follows the end"
            self.num_ends[request_id] = self.num_ends.get(request_id, 0) + bool(output.finish_reason)

    @invariant()
    def pages_agree(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(MOST_STEPS):
            if self.requested:
                self.read(10, False)
            self.step(1, True)
            if self.rig.scheduler.is_idle and not self.rig.inbox._items and not self.requested:
                break
        self.rig.assert_clean()
        self.take()
        assert self.num_ends.keys() == self.num_submits.keys(), "a request got no end"
        slots = self.rig.scheduler.adapters
        assert slots is not None
        slots.check([])


def test_random_commands_of_a_router() -> None:
    run_state_machine_as_test(WireMachine, settings=settings(max_examples=15, stateful_step_count=30, deadline=None))
