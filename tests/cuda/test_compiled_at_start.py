"""Every kernel that a step may launch was launched at start, and so compiled: none is compiled while requests wait."""

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.cuda.setup import LLAMA_8B
from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.attention.layerwise import trial_steps
from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.grammar.masks import GrammarMasks
from lorikeet.shard.model import Model
from lorikeet.shard.requests.request import Source
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.speculation.device.device_drafts import StepDrafts

if TYPE_CHECKING or importlib.util.find_spec("triton") is not None:
    from lorikeet.shard.sampling.device import Tile
    from tests.cuda.decode_step import META, PAGE, model_of, without_values
    from tests.cuda.launches import Launch, recorded

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
SHAPE = replace(LLAMA_8B, layers=1, vocabulary=32_000)


SAMPLING = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(do_sample=True, seed=3),
    "filters and penalties": SamplingParams(do_sample=True, top_p=0.9, top_k=5, repetition_penalty=1.2),
}


def start(model: Model) -> "set[Launch]":
    """What is launched before the first request, without graphs."""
    spec = model.bindings[0].spec
    assert spec is not None
    with recorded() as found, torch.inference_mode():
        kv = model.backend.allocate(spec, 16, torch.bfloat16, META)
        for segments in trial_steps(PAGE):
            inputs = StepInputs(PAGE, META)
            num_rows = sum(segment.num_tokens for segment in segments)
            ids = torch.empty(num_rows, dtype=torch.long, device=META)
            inputs.fill(segments, ids, ids[:1])
            model.backend.prepare(inputs)
            heads = ((spec.num_heads, spec.key_dim), *[(spec.num_kv_heads, spec.key_dim)] * 2)
            rows = (torch.empty(num_rows, *head, dtype=torch.bfloat16, device=META) for head in heads)
            model.backend.attend(spec, kv, *rows)
        step(model, [Segment(0, 64, range(1))])  # the memory of the largest step is measured
        model.warm_up_adapters()
    return set(found.launches)


def step(model: Model, segments: list[Segment], heads: list[HeadsRow] | None = None) -> None:
    num_rows = sum(segment.num_tokens for segment in segments)
    ids = torch.empty(num_rows, dtype=torch.long, device=META)
    wanted = range(len(segments))
    model.inputs.fill(segments, ids, ids[: len(segments)], wanted, heads or [])
    model.backend.prepare(model.inputs)
    model.inputs.send()
    model.compute()


STEPS: dict[str, tuple[list[Segment], list[HeadsRow]]] = {
    "one token": ([Segment(3, 1, range(1))], []),
    "a long context": ([Segment(1500, 1, range(24)), Segment(7, 3, range(1))], []),
    "a prompt": ([Segment(0, 777, range(13))], []),
    "adapters": ([Segment(9, 1, range(1), 2), Segment(0, 33, range(1), -1), Segment(4, 5, range(1), 1)], []),
    "heads": ([Segment(9, 1, range(1), 2), Segment(5, 1, range(1))], [HeadsRow(0, 2, 3), HeadsRow(1, 4, 1)]),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_step_launches_a_kernel_that_start_did_not(name: str) -> None:
    segments, heads = STEPS[name]
    with without_values():
        model = model_of(SHAPE, has_adapters=True)
        compiled = start(model)
        with recorded() as found, torch.inference_mode():
            step(model, segments, heads)
    missing = set(found.launches) - compiled
    assert not missing, sorted(map(str, missing))
    norms = "adapted_norm_rows" if any(segment.slot >= 0 for segment in segments) else "norm_rows"
    assert {launch.kernel for launch in found.launches} >= {"attend", "rotate_heads", norms, "gate_rows"}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_launches_no_kernel_that_start_did_not(name: str) -> None:
    with without_values(), recorded() as found:
        sampler = Sampler(SHAPE.vocabulary, 4, META, tile=Tile())
        sampler.warm_up()
    compiled = set(found.launches)
    with recorded() as found:
        for row in range(3):
            sampler.add(row, SAMPLING[name], LogprobParams(wanted=row == 1), [1, 2], 2)
        logits = torch.empty(8, SHAPE.vocabulary, device=META)
        sampler.sample(logits[:3], range(3), [2] * 3)
        sampler.verify(logits[:5], range(3), [3] * 3, [[1], [], [2]])
        sampler.add(3, SamplingParams(), LogprobParams(), [1, 2], 2, most_tokens=5000)
        step = StepDrafts()
        step.add(1, 3, range(1, 4), Source.LOOKUP, heads=(3, 2))
        sampled = sampler.verify(logits[:4], [0, 3], [3] * 2, [[], [0, 0]], None, step)
        head_ids = torch.empty(9, dtype=torch.long, device=META)
        sampler.device_drafts.advance(step, sampled.token_ids, sampled.bad, head_ids)
    assert {launch.kernel for launch in found.launches} >= {"scan", "resolve", "draft"}
    assert set(found.launches) <= compiled


def test_without_custom_kernels_pytorch_samples() -> None:
    with without_values(), recorded() as found:
        sampler = Sampler(SHAPE.vocabulary, 4, META, tile=Tile(), has_kernels=False)
        sampler.warm_up()
        sampler.add(0, SAMPLING["sampled"], LogprobParams(), [1, 2], 2)
        sampler.sample(torch.empty(1, SHAPE.vocabulary, device=META), [0], [2])
    assert found.launches == []


def test_masks_of_grammars_launch_no_kernel_that_start_did_not() -> None:
    masks = GrammarMasks(SHAPE.vocabulary, META)
    with without_values(), recorded() as found:
        masks.warm_up()
    compiled = set(found.launches)
    packed = torch.empty(3, 1 + SHAPE.vocabulary // 32, dtype=torch.int32, device=META)
    with without_values(), recorded() as found:
        masks._mask_rows(torch.empty(8, SHAPE.vocabulary, device=META), packed)
    assert {launch.kernel for launch in compiled} == {"mask_tokens"} and set(found.launches) <= compiled


def test_what_start_launches() -> None:
    with without_values():
        names = {launch.kernel for launch in start(model_of(SHAPE, has_adapters=True))}
    parts = {"norm_rows", "adapted_norm_rows", "rotate_heads", "gate_rows", "head_block", "head_logits"}
    assert names == {"attend", "store", "shrink", "expand", *parts}
