"""The engine draws the exact joint distribution of three tokens: scheduling, pages, rows and sampling together.

The model is an order-2 Markov chain that reads its two tokens through the page table, so the distribution of a text
after any prompt is known; thousands of requests with distinct seeds, mixed with others, are tested against it.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from lorikeet.proto.params import Method, SamplingParams, Speculation, Verification
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.engine.engine import Engine, LoopConfig
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, StreamOpened
from lorikeet.shard.requests.request import FinishReason, Request
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.scheduler.budget import Limits
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.scheduler import Scheduler
from lorikeet.shard.speculation.draft_network import DraftNetwork
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.sampling import oracle
from tests.shard.sampling.drawing import params
from tests.shard.sampling.oracle import Case

V = 24
EPOCH = 1
PAGE_SIZE = 4
MAX_RUNNING = 200
NUM_TOKENS = 3
NUM_REQUESTS = 20_000
PROMPTS = ([3, 3, 7, 1, 9, 2, 6], [5, 2, 8])
"""The last pages fill up while the text is drawn, so that pages run short."""
LOGITS = np.random.default_rng(3).normal(size=(V, V, V)).astype(np.float32) * 2
DRAFT_LOGITS = LOGITS + np.random.default_rng(4).normal(size=(V, V, V)).astype(np.float32) * 1.5
"""Logits of the draft model: it often wants the same."""


class MarkovModel:
    """The next token depends on the last two, as found in the pages."""

    def __init__(self, num_pages: int, logits: np.ndarray = LOGITS) -> None:
        self._logits = logits
        self.inputs = StepInputs(PAGE_SIZE, torch.device("cpu"))
        # [N * P] the token in each slot
        self.slots = np.zeros(num_pages * PAGE_SIZE, dtype=np.int64)

    def forward(self) -> torch.Tensor:
        """[S, V] logits."""
        inputs = self.inputs
        self.slots[inputs.kv_slots.numpy()] = inputs.input_ids.numpy()
        # [T] slot of the token before each token of the step
        before = np.array(
            [
                segment.page_ids[(position - 1) // PAGE_SIZE] * PAGE_SIZE + (position - 1) % PAGE_SIZE
                for segment in inputs.segments
                for position in range(segment.start, segment.kv_len)
            ]
        )
        rows = inputs.logits_rows.numpy()
        return torch.from_numpy(self._logits[self.slots[before[rows]], inputs.input_ids.numpy()[rows]])


@dataclass
class Distribution:
    """Texts of three tokens after one prompt, under one case."""

    prompt_ids: list[int]
    case: Case
    counts: np.ndarray = field(default_factory=lambda: np.zeros((V,) * NUM_TOKENS, dtype=np.int64))

    def exact(self) -> np.ndarray:
        """[V, V, V]: the probability of each text."""
        joint = np.zeros((V,) * NUM_TOKENS)
        first = self._next([])
        for one in np.flatnonzero(first):
            second = self._next([int(one)])
            for two in np.flatnonzero(second):
                joint[one, two] = first[one] * second[two] * self._next([int(one), int(two)])
        return joint

    def _next(self, output: list[int]) -> np.ndarray:
        known = self.prompt_ids + output
        return oracle.distribution(LOGITS[known[-2], known[-1]], self.case, self.prompt_ids, output)


@dataclass(frozen=True)
class Running:
    """How the engine runs."""

    commit_lag: int
    num_pages: int
    step_tokens: int
    rule: Verification | None = None
    """How drafts are verified, with a draft model."""
    num_prompts: int = len(PROMPTS)
    num_requests: int = NUM_REQUESTS


def make_requests(distributions: list[Distribution], running: Running) -> list[Request]:
    """Requests for every distribution in turn, each with its own seed; every fifth is an unrelated one."""
    requests, rule = [], running.rule
    for i in range(running.num_requests * 5 // 4):
        distribution = distributions[i % len(distributions)]
        sampling = SamplingParams(presence_penalty=1.0) if i % 5 == 4 else params(distribution.case, seed=i)
        prompt_ids = list(distribution.prompt_ids)
        requests.append(Request((EPOCH, i), prompt_ids, len(prompt_ids), NUM_TOKENS, sampling=sampling))
        if rule is not None:
            requests[-1].speculation = Speculation(Method.DRAFT, 1 + i % 3, verify=rule)
            requests[-1].max_new_tokens += 2  # room for drafts of all three
    return requests


def run(requests: list[Request], running: Running) -> int:
    """Run them all to the end, some at a time. Returns how often one was preempted."""
    scheduler = Scheduler(
        KvCache(running.num_pages, PAGE_SIZE, prefix_caching=True),
        Limits(running.step_tokens, MAX_RUNNING, True, 512),
        drafts=DraftSettings(MAX_RUNNING, has_draft_model=True),
    )
    inbox, outbox = Inbox(), Outbox()
    sampler = Sampler(V, MAX_RUNNING, torch.device("cpu"))
    config = LoopConfig(running.commit_lag, max_waiting=MAX_RUNNING)
    drafter = DraftNetwork(MarkovModel(running.num_pages, DRAFT_LOGITS), sampler, V, V)
    engine = Engine(MarkovModel(running.num_pages), sampler, scheduler, (inbox, outbox), config, drafter)
    outbox.open(EPOCH, wake=lambda: None)
    inbox.put(StreamOpened(EPOCH))
    for start in range(0, len(requests), MAX_RUNNING):
        inbox.put(Commands(EPOCH, submits=list(requests[start : start + MAX_RUNNING])))
        engine.step()
        while len(scheduler.requests) > MAX_RUNNING // 2:
            engine.step()
        outbox.take(EPOCH)
    while not scheduler.is_idle:
        engine.step()
    scheduler.check()
    return scheduler.num_preempted


MASKED = Case(
    top_k=8,
    allowed_ids=tuple(range(20)),
    bad_words=((3,), (4, 5), *((token, token) for token in range(20)), *((1, token, 7) for token in range(20))),
    min_tokens=2,
    min_tokens_stop_ids=(6, 9),
)
RUNS = {
    "lag 0": (Running(0, 2000, 512), [Case(top_k=8), MASKED]),
    "lag 1, few pages, small chunks": (
        Running(1, 40, 61),
        [
            Case(temperature=1.3, top_k=8, repetition_penalty=1.3, frequency_penalty=0.5),
            Case(temperature=0.8, top_p=0.9, presence_penalty=0.7, logit_bias=((4, 1.0),)),
        ],
    ),
    "drafts, coupled": (Running(0, 2000, 512, Verification.SHARED_NOISE), [Case(top_k=8)]),
    "drafts, rejection": (Running(0, 2000, 512, Verification.REJECTION), [Case(top_k=8), MASKED]),
    "drafts, rejection, fewer requests": (
        Running(0, 2000, 512, Verification.REJECTION, num_requests=5_000),
        [Case(top_k=8), MASKED],
    ),
    "drafts, rejection, one distribution": (
        Running(0, 2000, 512, Verification.REJECTION, num_prompts=1, num_requests=8_000),
        [Case(top_k=8)],
    ),
    "drafts, masks, lag 1": (Running(1, 2000, 512, Verification.SHARED_NOISE), [MASKED]),
    "drafts, rejection, all transforms, lag 1": (
        Running(1, 2000, 512, Verification.REJECTION),
        [Case(temperature=1.3, top_k=8, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((4, 1.0),))],
    ),
}


SHORT = ("drafts, rejection, fewer requests", "drafts, rejection, one distribution")
"""What `make test` runs."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in RUNS])
def test_three_tokens_follow_the_exact_joint_distribution(name: str) -> None:
    running, cases = RUNS[name]
    distributions = [Distribution(prompt_ids, case) for case in cases for prompt_ids in PROMPTS[: running.num_prompts]]
    requests = make_requests(distributions, running)
    num_preempted = run(requests, running)
    assert (num_preempted > 0) == (running.num_pages < MAX_RUNNING)
    for i, request in enumerate(requests):
        assert request.finish_reason is FinishReason.LENGTH
        if i % 5 != 4:
            output = request.token_ids[request.num_prompt :]
            distributions[i % len(distributions)].counts[tuple(output[:NUM_TOKENS])] += 1
    assert sum(distribution.counts.sum() for distribution in distributions) == running.num_requests
    for distribution in distributions:
        assert oracle.fit(distribution.counts, distribution.exact()) > 1e-6 / 6
