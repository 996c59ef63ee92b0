"""Which steps sample their tokens in the graph, and that texts stay the same: on CPU, with a tape in place of graphs.
graphs_triton_cases.py does it with the kernels.
"""

import copy
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

from lorikeet.proto.params import Grammar, LogprobParams, Method, SamplingParams, Speculation
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import MOST_WANTED
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model import Model
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.graphs import CannotCapture
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.requests.request import Request
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.sampling.plan import Fused, Planner, Row
from lorikeet.shard.sampling.report import Sampled, SlowRows, result_bytes
from lorikeet.shard.speculation.drafter import DraftSettings
from lorikeet.shard.system.operators import operator
from tests.shard.grammar import small_tokenizer
from tests.shard.model.dense_attention import DenseAttention
from tests.shard.model.tape import TapeRecorder
from tests.shard.model.test_graphs import (
    MOST_ROWS,
    MOST_TOKENS,
    NUM_PAGES,
    PAGE_SIZE,
    VOCAB,
    config_of,
    model_with,
    network_of,
    padding,
)
from tests.shard.ranks_in_threads import together
from tests.shard.rig import Rig, Setup, make_request

CPU = torch.device("cpu")


@operator("highest_of_rows", mutates_args=("results", "last_tokens", "kept_logits"))
def highest_of_rows(
    logits: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, results: list[torch.Tensor],
    last_tokens: torch.Tensor, kept_logits: torch.Tensor | None, updates: bool,
) -> None:  # fmt: skip
    """As sample_rows of the kernels, for greedy requests. results: tokens, bad, overflowed, log probabilities."""
    for index, row in zip(indices.tolist(), rows.tolist(), strict=True):
        if row < 0:
            if kept_logits is not None:
                kept_logits[index] = logits[index]
            continue
        for result, value in zip(results, (int(logits[index].argmax()), 0, 0, float("nan")), strict=True):
            result[index] = value
        if updates:
            last_tokens[row] = results[0][index]


class Highest:
    """In place of DeviceRows, without Triton."""

    def __init__(self, last_tokens: torch.Tensor) -> None:
        self._last_tokens = last_tokens
        self._memory = torch.zeros(result_bytes(MOST_WANTED), dtype=torch.uint8)

    def launch(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, kept_logits: torch.Tensor
    ) -> None:
        results = self.results(len(positions), len(positions))
        self._sample(logits, torch.arange(len(rows)), rows, results, kept_logits, True)

    def sample(self, logits: torch.Tensor, fused: Fused, _: torch.Tensor, results: Sampled, updates: bool) -> None:
        self._sample(logits, fused.indices, fused.rows, results, None, updates)

    def _sample(
        self, logits: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, sampled: Sampled,
        kept_logits: torch.Tensor | None, updates: bool,
    ) -> None:  # fmt: skip
        results = [sampled.token_ids, sampled.bad, sampled.overflowed, sampled.logprobs]
        highest_of_rows(logits, indices, rows, results, self._last_tokens, kept_logits, updates)

    def token_ids(self, num_rows: int) -> torch.Tensor:
        return self.results(num_rows, num_rows).token_ids

    def results(self, num_rows: int, num_places: int, slow_rows: SlowRows | None = None) -> Sampled:
        return Sampled([0] * num_rows, CPU, True, slow_rows, self._memory, num_places)

    def put(self, row: Row) -> None: ...

    def remove(self, row: int) -> None: ...


def with_kernels(sampler: Sampler) -> Sampler:
    sampler._on_device = cast(Any, Highest(sampler.last_tokens))
    sampler._state.planner = Planner(VOCAB, CPU, fuses=True)
    return sampler


def rig_of(lag: int, samples_in_graph: bool = True) -> tuple[Rig, Model]:
    """An engine whose steps are captured."""
    model = model_with()
    rig = Rig(
        Setup(NUM_PAGES, PAGE_SIZE, 64, 8, commit_lag=lag, network=model, drafts=DraftSettings(8, 1, 8, 4),
              grammars=small_tokenizer.compiler())
    )  # fmt: skip
    in_graph = with_kernels(rig.sampler).in_graph
    model.inputs.device_tokens, model.inputs.graph_sampling = rig.sampler.device_tokens, in_graph
    if not samples_in_graph:
        model.inputs.graph_sampling = None
    model.allocate_kv(NUM_PAGES + 1)
    model.capture(padding(), TapeRecorder(), padding().all(), is_checked=True)
    return rig, model


def requests() -> list[Request]:
    """One of each kind; the plain one is the last to end."""
    requests = [make_request(index, [5 * index + 3, 7, 9, 7, 9], 20 - 3 * index) for index in range(6)]
    requests[1].speculation = requests[5].speculation = Speculation(Method.LOOKUP, 3)
    requests[2].logprobs = LogprobParams(wanted=True, alternatives=2)
    requests[3].logprobs = LogprobParams(prefill=True, prefill_alternatives=1)
    requests[4].grammar, requests[4].stop_ids = (
        Grammar(small_tokenizer.regex("[a-f]{30}")),
        frozenset({small_tokenizer.EOS}),
    )
    return requests


def steps_of(rig: Rig, model: Model, *requests: Request) -> list[tuple[bool, int]]:
    """Run the requests. Of each step: whether it sampled in the graph, and the logits that were wanted."""
    rig.submit(*requests)
    steps = list[tuple[bool, int]]()
    while not steps or not rig.scheduler.is_idle:
        rig.step()
        steps.append((model.inputs.is_sampled, model.inputs.num_wanted))
    rig.assert_clean()
    return steps


@pytest.mark.parametrize("lag", [0, 1])
def test_texts_are_those_of_sampling_outside_the_graph(lag: int) -> None:
    results = []
    for samples_in_graph in (True, False):
        rig, model = rig_of(lag, samples_in_graph)
        assert any(was_sampled for was_sampled, _ in steps_of(rig, model, *requests())) is samples_in_graph
        results.append([(rig.outputs[index].token_ids, rig.outputs[index].details) for index in range(6)])
    assert results[0] == results[1]


OUTSIDE: dict[str, dict[str, object]] = {
    "alternatives": {"logprobs": LogprobParams(wanted=True, alternatives=2)},
    "watermark": {"sampling": SamplingParams(watermark=True)},
    "bad words": {"sampling": SamplingParams(bad_words=((5, 6),))},
    "grammar": {"grammar": Grammar(small_tokenizer.regex("[a-f]{30}")), "stop_ids": frozenset({small_tokenizer.EOS})},
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_step_with_a_row_that_the_graph_cannot_sample_is_sampled_outside(name: str) -> None:
    rig, model = rig_of(0)
    steps = steps_of(rig, model, make_request(0, [3, 7, 9], 12), make_request(1, [3, 7, 9], 4, **OUTSIDE[name]))
    assert [was_sampled for was_sampled, _ in steps] == [False] * 4 + [True] * 8


def test_a_step_with_drafts_is_sampled_outside() -> None:
    rig, model = rig_of(0)
    request = make_request(0, list(range(0, 60, 4)), 15, speculation=Speculation(Method.LOOKUP, 3))
    steps = steps_of(rig, model, request)
    assert {(num_wanted == 1, was_sampled) for was_sampled, num_wanted in steps} == {(True, True), (False, False)}


def test_a_step_without_padding_is_sampled_outside() -> None:
    rig, model = rig_of(0)
    assert steps_of(rig, model, make_request(0, list(range(20)), 3)) == [(False, 1), (True, 1), (True, 1)]


def test_a_step_with_prompt_tokens_that_are_scored_is_sampled_inside() -> None:
    rig, model = rig_of(0)
    scored = LogprobParams(prefill=True, prefill_alternatives=1)
    assert steps_of(rig, model, make_request(0, [3, 7, 9], 2, logprobs=scored)) == [(True, 3), (True, 1)]


def test_a_graph_that_samples_another_token_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = rig_of(0)
    assert model.graphs is not None
    lowest = torch.zeros(MOST_ROWS, dtype=torch.long)
    monkeypatch.setattr(Highest, "token_ids", lambda _, num_rows: lowest[:num_rows])
    with pytest.raises(CannotCapture, match="samples lower logits"), torch.inference_mode():
        model.graphs.check()


def test_of_several_ranks_the_first_one_samples() -> None:
    config = config_of(2)
    whole = network_of(config)
    parts = [whole, copy.deepcopy(whole)]

    def tokens(group: Group, network: nn.Module) -> tuple[bool, list[int], list[int]]:
        """Whether the rank samples, its tokens, and those with the highest logits."""
        inputs, backend = StepInputs(PAGE_SIZE, CPU), DenseAttention(PAGE_SIZE, 64, MOST_TOKENS)
        model = assemble(network, config, backend, torch.float16, inputs, MOST_TOKENS, group)
        model.allocate_kv(NUM_PAGES + 1)
        highest = Highest(torch.zeros(4, dtype=torch.long))
        if group.rank == 0:
            inputs.graph_sampling = highest
        model.capture(padding(), TapeRecorder(), padding().all(), True, group.agree)
        expected = list[int]()
        for rows in ([], [2, 1]):
            segments = [Segment(0, 3, range(8)), Segment(0, 1, range(8, 16))]
            inputs.fill(segments, torch.tensor([3, 7, 9, 5]), torch.tensor([2, 3]), [2, 3], sampled_rows=rows)
            highest_ids = model.forward().argmax(1).tolist()
            expected = expected if rows else highest_ids
        return inputs.is_sampled, highest.token_ids(4)[:2].tolist(), expected

    first, second = together([partial(tokens, network=part) for part in parts])
    assert first == (True, first[2], first[2])
    assert second == (False, [0, 0], first[2])
