"""Captured steps with adapters: one graph for any mix of them, and of ranks. Run by test_graphs.py in a process of its
own, with TRITON_INTERPRET=1.
"""

from dataclasses import replace

import torch

from shard.batch import Segment
from shard.model import Model
from shard.model.lora import AdapterSite, SlotWeights
from shard.model.lora_device import sites_of
from shard.padding import Padding
from tests.shard.model.lora_triton_cases import LARGEST, MIXES, NONE_OF_IT, Bench
from tests.shard.model.tape import TapeRecorder
from tests.shard.model.test_graphs import MOST_TOKENS, NUM_PAGES, VOCAB, model_with

MOST_ROWS = 8
CLOSE = 2.0**-7
COUNTS = [1, 1, 3, 0, 2, 0, 1, 0, 0]
SMALL = 0.1


class Adapters(Bench):
    """Adapters whose deltas leave float16 in its range."""

    def weights(self, slot: int, site: AdapterSite) -> SlotWeights | None:
        found = super().weights(slot, site)
        if found is None:
            return None
        b, bias = (None if tensor is None else SMALL * tensor for tensor in (found.b, found.bias))
        return replace(found, b=b, bias=bias)


def with_adapters() -> tuple[Model, Bench]:
    """A tiny model with adapters of many ranks, DoRA and biases among them."""
    model = model_with(num_layers=1)
    bench = Adapters(torch.float16, sites_of(model.adapter_sites), model.inputs)
    bench.load(*range(7))
    model.allocate_kv(NUM_PAGES + 1)
    return model, bench


def step(model: Model, slots: list[int], counts: list[int]) -> torch.Tensor:
    """The first step of requests with these slots. Returns the logits of all rows."""
    segments = [
        Segment(0, count, range(4 * index, 4 * index + 4), slot)
        for index, (slot, count) in enumerate(zip(slots, counts, strict=True))
        if count
    ]
    rows = list(range(sum(counts)))
    ids = (7 * torch.arange(len(rows)) + 3) % VOCAB
    model.inputs.fill(segments, ids, torch.tensor(rows), rows)
    return model.forward().clone()


def test_one_graph_holds_any_mix_of_adapters_and_ranks() -> None:
    (plain, bench), (graphed, later) = with_adapters(), with_adapters()
    recorder, padding = TapeRecorder(), Padding(MOST_ROWS, MOST_TOKENS, NUM_PAGES, has_adapters=True)
    padding.row_counts = [MOST_ROWS]
    graphed.capture(padding, recorder, [each for each in padding.all() if not each.num_guesses])
    for each in (bench, later):  # came after the graph was captured
        each.generator.manual_seed(7)
        each.load(LARGEST)
    mixes = [MIXES["distinct"], MIXES["zipf"], MIXES["none"], [LARGEST, 1, 2, -1, LARGEST, 0, 3, 8, -1]]
    bare = step(plain, [-1] * 9, COUNTS)
    for slots in mixes:
        expected, found = (step(model, slots, COUNTS) for model in (plain, graphed))
        assert float((found - expected).abs().max()) <= CLOSE * float(expected.abs().max())
        differs = (expected - bare).abs().amax(1) > 4 * CLOSE * float(expected.abs().max())
        assert bool(differs.any()) == any(slot not in (-1, NONE_OF_IT) for slot in slots)
    assert recorder.num_replayed == len(mixes)
