"""An engine with the fake model, driven step by step."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.batch.inputs import Network
from lorikeet.shard.engine.engine import Engine, LoopConfig
from lorikeet.shard.grammar.compiler import GrammarCompiler
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, Output, StreamOpened, StreamUpdate
from lorikeet.shard.requests.request import Request
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.scheduler.budget import Limits
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.scheduler import Scheduler
from lorikeet.shard.speculation.device.device_drafts import MOST_DRAFTS
from lorikeet.shard.speculation.draft_network import DraftNetwork
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.fake_model import VOCAB_SIZE, DraftModel, FakeModel, states_of

if TYPE_CHECKING:
    from lorikeet.shard.sampling.device import Tile

EPOCH = 1


@dataclass(frozen=True)
class Setup:
    """Parameters of a test case."""

    num_pages: int = 200
    page_size: int = 4
    step_tokens: int = 512
    max_running: int = 16
    max_waiting: int = 64
    chunked_prefill: bool = True
    prefix_caching: bool = True
    commit_lag: int = 0
    max_scored: int = 512
    drafts: DraftSettings | None = None
    draft: DraftModel | None = None
    network: Network | None = None
    """Replaces the fake model."""
    draft_network: Network | None = None
    """Replaces the fake model's draft model; both have this vocabulary."""
    vocab_size: int = VOCAB_SIZE
    drafts_on_device: bool = False
    tile: "Tile | None" = None
    """Sample by kernels with these sizes, in steps that are captured later too."""
    grammars: GrammarCompiler | None = None


class UnreadOutbox(Outbox):
    """No stream reads what it announces, so that to wait for one takes the whole time limit."""

    def announce_step(self, keys: Iterable[tuple[int, int]], wait_s: float = 0.0) -> None:
        super().announce_step(keys)


class Rig:
    """One stream's view of an engine."""

    def __init__(self, setup: Setup | None = None, outbox: Outbox | None = None) -> None:
        setup = setup or Setup()
        self.draft: FakeModel | None = None
        self.model = FakeModel(setup.num_pages, setup.page_size)
        limits = Limits(setup.step_tokens, setup.max_running, setup.chunked_prefill, setup.max_scored)
        cache = KvCache(setup.num_pages, setup.page_size, setup.prefix_caching)
        self.inbox, self.outbox = Inbox(), outbox or UnreadOutbox()
        inputs, drafts = (setup.network or self.model).inputs, setup.drafts
        sampler = self.sampler = Sampler(setup.vocab_size, setup.max_running, inputs.device, tile=setup.tile)
        if setup.tile is not None:
            inputs.device_tokens, inputs.graph_sampling = sampler.device_tokens, sampler.in_graph
        if setup.drafts_on_device:
            assert drafts is not None
            drafts = replace(drafts, most_on_device=MOST_DRAFTS)
            inputs.num_accepted = sampler.device_drafts.num_accepted
        self.scheduler = Scheduler(cache, limits, drafts=drafts)
        config = LoopConfig(setup.commit_lag, setup.max_waiting)
        self.engine = Engine(
            setup.network or self.model,
            sampler,
            self.scheduler,
            (self.inbox, self.outbox),
            config,
            self._drafter(setup),
            setup.grammars,
        )
        self.num_wakes = 0
        self.watches_kv = False
        self.outbox.open(EPOCH, wake=self._wake)
        self.inbox.put(StreamOpened(EPOCH))
        self.outputs: dict[int, Output] = {}

    def submit(self, *requests: Request) -> None:
        self.inbox.put(Commands(EPOCH, submits=list(requests)))

    def abort(self, *ids: int) -> None:
        self.inbox.put(Commands(EPOCH, abort_ids=list(ids)))

    def step(self, num_steps: int = 1) -> StreamUpdate:
        """Step, and collect the outputs."""
        for _ in range(num_steps):
            self.engine.step()
            if self.watches_kv:
                self.assert_kv_is_true()
        update = self.outbox.take(EPOCH)
        self.take(update)
        return update

    def take(self, update: StreamUpdate) -> None:
        """Collect the outputs of an update."""
        for output in update.request_outputs():
            earlier = self.outputs.setdefault(output.key[1], output)
            if earlier is not output:
                assert not earlier.finish_reason, "an output follows the end"
                earlier.merge(output)

    def run(self, *requests: Request) -> dict[int, Output]:
        """Run to the end; then every page must be free."""
        if requests:
            self.submit(*requests)
        self.step()
        num_left = sum(len(r.token_ids) + r.max_new_tokens for r in self.scheduler.requests.values())
        for _ in range(4 * num_left + 4):
            if self.scheduler.is_idle:
                break
            self.step()
        self.assert_clean()
        return self.outputs

    def assert_kv_is_true(self) -> None:
        """The slots of every running request hold the content of its text, for target and draft model."""
        for request in self.scheduler.running:
            states = states_of(request.token_ids)
            num_committed = len(request.token_ids) - 1 if request.is_decoding else request.num_committed
            parts = [(self.model, num_committed)]
            if self.draft is not None and not request.num_launched:
                parts.append((self.draft, request.num_draft_computed))
            for model, num_tokens in parts:
                assert num_tokens <= len(request.token_ids)
                found = [model.slots[slot] for slot in model.slots_of(request.page_ids, num_tokens)]
                assert found == states[:num_tokens]

    def assert_clean(self) -> None:
        assert self.scheduler.is_idle
        self.scheduler.check()
        assert self.scheduler.cache.num_owned == 0

    def _drafter(self, setup: Setup) -> DraftNetwork | None:
        if setup.draft_network is not None:
            return DraftNetwork(setup.draft_network, self.sampler, setup.vocab_size, setup.vocab_size)
        if setup.draft is None:
            return None
        self.draft = setup.draft.make(setup.num_pages, setup.page_size)
        return DraftNetwork(self.draft, self.sampler, VOCAB_SIZE, VOCAB_SIZE)

    def _wake(self) -> None:
        self.num_wakes += 1


def make_request(request_id: int, prompt_ids: list[int], max_new_tokens: int, **values: object) -> Request:
    """A greedy request."""
    request = Request((EPOCH, request_id), list(prompt_ids), len(prompt_ids), max_new_tokens)
    for name, value in values.items():
        assert hasattr(request, name)
        setattr(request, name, value)
    return request


def copy_of(request: Request, request_id: int) -> Request:
    """The same request under another id, as it was submitted."""
    return make_request(
        request_id,
        request.token_ids[: request.num_prompt],
        request.max_new_tokens,
        sampling=replace(request.sampling),
        logprobs=request.logprobs,
        stop_ids=request.stop_ids,
        speculation=request.speculation,
        grammar=request.grammar,
    )


SAMPLED = SamplingParams(do_sample=True, temperature=1.3, top_p=0.9, repetition_penalty=1.1, seed=11)
SCORED = LogprobParams(wanted=True, alternatives=2, raw=True, prefill=True, prefill_alternatives=3, prefill_ranks=True)
