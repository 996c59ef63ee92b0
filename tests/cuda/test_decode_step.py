"""A ratchet on what a decode step of Llama 3.1 8B launches and moves. Lower a number when it falls; raise one
only for what a card has shown to be faster."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.cuda.setup import LLAMA_8B
from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.model import Model

if TYPE_CHECKING or importlib.util.find_spec("triton") is not None:
    from benchmarks.serving import host_time
    from tests.cuda.decode_step import count_graph, count_outside, count_sampling, model_of, without_values

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
FEW = 2
"""Layers of the smaller of two models, whose difference is a layer."""
GREEDY = SamplingParams()
SAMPLED = SamplingParams(do_sample=True, temperature=0.8)
NUCLEUS = replace(SAMPLED, top_p=0.9)
GRAPH = {False: 299, True: 558}
"""Launches of a captured step at any batch, without and with adapters: the forward pass, and the sampling of any rows.
Adapters take two launches for each product, which an H200 computes in less time than one cooperative launch.
"""
GRAPH_MB = {1: 15_015, 8: 15_048, 64: 15_314, 256: 16_227}
"""Megabytes that PyTorch's operators move in it, by batch: weights and activations, without KV."""
SAMPLING = {"greedy": (GREEDY, 2), "temperature": (SAMPLED, 2), "top-p": (NUCLEUS, 5)}
"""Launches of sampling outside a graph, at any batch. None of them is an operator of PyTorch, which would write
temporaries.
"""


@pytest.fixture(scope="module")
def models() -> Iterator[dict[bool, list[Model]]]:
    """Models of two and of three layers, by whether they have adapters."""
    with without_values():
        shapes = [replace(LLAMA_8B, layers=FEW + more) for more in (0, 1)]
        yield {has: [model_of(shape, has) for shape in shapes] for has in (False, True)}


@pytest.mark.parametrize("batch", GRAPH_MB)
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_graph_launches_no_more_than_before(models: dict[bool, list[Model]], has_adapters: bool, batch: int) -> None:
    with without_values():
        small, large = (count_graph(model, batch, has_adapters) for model in models[has_adapters])
    further = LLAMA_8B.layers - FEW
    assert small.launches + further * (large.launches - small.launches) <= GRAPH[has_adapters]
    assert small.bytes + further * (large.bytes - small.bytes) <= GRAPH_MB[batch] * 10**6


@pytest.mark.parametrize("batch", GRAPH_MB)
@pytest.mark.parametrize(("params", "most"), SAMPLING.values(), ids=SAMPLING.keys())
def test_sampling_launches_no_more_than_before(params: SamplingParams, most: int, batch: int) -> None:
    with without_values():
        found = count_sampling(LLAMA_8B.vocabulary, [replace(params, seed=seed) for seed in range(batch)])
    assert found.launches <= most and found.bytes == 0


@pytest.mark.parametrize("batch", GRAPH_MB)
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_step_is_two_copies_and_one_replay(models: dict[bool, list[Model]], has_adapters: bool, batch: int) -> None:
    """Outside the graph there is one copy to the device and one copy back."""
    with without_values():
        found, launches = count_outside(models[has_adapters][0], batch, has_adapters)
    assert (found.to_device, found.operators, found.to_host) == (1, 0, 1)
    assert launches == 0


@pytest.mark.parametrize("logprobs", [LogprobParams(wanted=True), LogprobParams(wanted=True, alternatives=3)])
def test_log_probabilities_are_in_the_same_copies(models: dict[bool, list[Model]], logprobs: LogprobParams) -> None:
    with without_values():
        found, _ = count_outside(models[False][0], 8, has_adapters=False, logprobs=logprobs)
    assert (found.to_device, found.to_host) == (1, 1)


def test_the_host_s_time_of_a_step_is_measured() -> None:
    assert host_time.measured_ms(host_time.HostCase("sampled", 2, 1.0), num_steps=2) > 0


def test_a_graph_launches_at_most_300_and_two_for_each_adapted_product() -> None:
    assert GRAPH[False] <= 300 and GRAPH[True] <= 300 + 2 * (4 * LLAMA_8B.layers + 1)
