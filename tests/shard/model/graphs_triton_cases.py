"""Captured steps with adapters, heads and sampling: one graph for any mix of them, and of ranks. Run by test_graphs.py
in a process of its own, on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

from dataclasses import replace

import pytest
import torch

from lorikeet.proto.params import Composition, LogprobParams, Method, SamplingParams, Speculation
from lorikeet.shard.batch.inputs import HeadsRow
from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model import Model
from lorikeet.shard.model.adapters.tables import targets_of
from lorikeet.shard.model.graphs import CudaRecorder, Launch
from lorikeet.shard.model.lora.targets import LoraTarget, SlotWeights
from lorikeet.shard.model.medusa.heads import HeadsContent, HeadsShape
from lorikeet.shard.sampling.device import Tile
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.model.lora.triton_cases import DEVICE, LARGEST, MIXES, NONE_OF_IT, NUM_SLOTS, Bench
from tests.shard.model.tape import TapeRecorder
from tests.shard.model.test_graphs import MOST_TOKENS, NUM_PAGES, PAGE_SIZE, VOCAB, model_with
from tests.shard.near import worst_share
from tests.shard.rig import Rig, Setup, make_request

MOST_ROWS = 8
CLOSE = 2.0**-7
COUNTS = [1, 1, 3, 0, 2, 0, 1, 0, 0]
SMALL = 0.1


class CountingRecorder:
    """CUDA's graphs on a device, a tape on CPU."""

    def __init__(self) -> None:
        self._recorder = TapeRecorder() if DEVICE.type == "cpu" else CudaRecorder(DEVICE)
        self.num_replayed = 0

    def __call__(self, compute: Launch) -> Launch:
        replay = self._recorder(compute)

        def counted() -> None:
            self.num_replayed += 1
            replay()

        return counted


class Adapters(Bench):
    """Adapters whose deltas leave float16 in its range."""

    def weights(self, slot: int, target: LoraTarget) -> SlotWeights | None:
        actual = super().weights(slot, target)
        if actual is None:
            return None
        b, bias = (None if tensor is None else SMALL * tensor for tensor in (actual.b, actual.bias))
        return replace(actual, b=b, bias=bias)


def with_adapters() -> tuple[Model, Bench]:
    """A tiny model with adapters of many ranks, DoRA and biases among them."""
    model = model_with(num_layers=1, device=DEVICE)
    targets = [target for target in targets_of(model.lora_targets) if not target.is_norm]
    bench = Adapters(torch.float16, targets, model.inputs)
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
    ids = (7 * torch.arange(len(rows), device=DEVICE) + 3) % VOCAB
    model.inputs.fill(segments, ids, torch.arange(len(rows), device=DEVICE), rows)
    return model.forward().clone()


def test_one_graph_holds_any_mix_of_adapters_and_ranks() -> None:
    (plain, bench), (graphed, later) = with_adapters(), with_adapters()
    recorder, padding = CountingRecorder(), Padding(MOST_ROWS, MOST_TOKENS, NUM_PAGES, has_adapters=True)
    padding.row_counts = [MOST_ROWS]
    graphed.capture(padding, recorder, [entry for entry in padding.all() if not entry.num_drafts])
    for entry in (bench, later):  # came after the graph was captured
        entry.generator.manual_seed(7)
        entry.load(LARGEST)
    mixes = [MIXES["distinct"], MIXES["zipf"], MIXES["none"], [LARGEST, 1, 2, -1, LARGEST, 0, 3, 8, -1]]
    bare = step(plain, [-1] * 9, COUNTS)
    for slots in mixes:
        expected, actual = (step(model, slots, COUNTS) for model in (plain, graphed))
        assert worst_share(actual, expected) <= CLOSE
        differs = (expected - bare).abs().amax(1) > 4 * CLOSE * float(expected.abs().max())
        assert bool(differs.any()) == any(slot not in (-1, NONE_OF_IT) for slot in slots)
    assert recorder.num_replayed == len(mixes)


def test_one_graph_holds_any_mix_of_sums() -> None:
    """Sums that came after the graph was captured, next to adapters and other rows, which keep their bits."""
    (plain, bench), (graphed, later) = with_adapters(), with_adapters()
    recorder = CountingRecorder()
    padding = Padding(4, MOST_TOKENS, NUM_PAGES, has_adapters=True, has_sums=True)
    padding.row_counts = [4]
    graphed.capture(
        padding, recorder, [entry for entry in padding.all() if entry.has_adapters and not entry.num_drafts]
    )
    assert graphed.graphs is not None and graphed.graphs.num_graphs == 2
    for entry in (bench, later):
        entry.kernels.compose(NUM_SLOTS, Composition(("a", "b"), (0.5, -1.0), (1.0, 0.75)), (1, 3))
        entry.kernels.compose(NUM_SLOTS + 1, Composition(("a",), (2.0,), (1.0,), shares_factors=True), (4,))
    first, second = NUM_SLOTS, NUM_SLOTS + 1
    mixes = [[first, second, -1, first], [first, 1, -1, 3], [-1, 1, -1, -1]]
    counts, rows = [1, 1, 1, 1], {}
    bare = step(plain, [-1] * 4, counts)
    for slots in mixes:
        expected, actual = (step(model, slots, counts) for model in (plain, graphed))
        assert worst_share(actual, expected) <= CLOSE
        for index, (slot, row) in enumerate(zip(slots, range(4), strict=True)):
            assert torch.equal(rows.setdefault((index, slot), actual[row]), actual[row]), "equal bits in any batch"
            differs = (actual[row] - bare[row]).abs().max() > 4 * CLOSE * float(bare.abs().max())
            assert bool(differs) == (slot != -1)
    assert recorder.num_replayed == len(mixes)


def put_heads(model: Model, slot: int, shape: HeadsShape) -> None:
    """Random heads, the same for every model."""
    generator = torch.Generator().manual_seed(slot)
    made = [torch.randn(size, generator=generator).half() / 6 for size in shape.tensors()]
    sizes = [-(-tensor.nbytes // 64) * 64 for tensor in made]
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=DEVICE)
    for piece, tensor in zip(memory.split(sizes), made, strict=True):
        piece[: tensor.nbytes].view(torch.float16).copy_(tensor.flatten())
    model.heads.put(slot, HeadsContent(shape, torch.float16, memory.numel(), torch.empty(0)).on(memory))


def test_one_graph_holds_any_mix_of_heads() -> None:
    """Checks heads of both versions and of one and two blocks, which came after the graph was captured."""
    plain, graphed = model_with(num_layers=1, device=DEVICE), model_with(num_layers=1, device=DEVICE)
    recorder, padding = CountingRecorder(), Padding(4, MOST_TOKENS, NUM_PAGES, has_adapters=True)
    padding.row_counts = [4]
    for model in (plain, graphed):
        model.allocate_adapters(4)
        model.enable_device_kernels(4, max_rows=8, max_drafts=16)
        model.allocate_kv(NUM_PAGES + 1)
    graphed.capture(padding, recorder, [entry for entry in padding.all() if entry.num_drafts])
    for model in (plain, graphed):
        put_heads(model, 1, HeadsShape(3, 1, 32, 0))
        put_heads(model, 2, HeadsShape(2, 2, 32, VOCAB))
    segments = [Segment(0, 2, range(4)), Segment(0, 1, range(4, 8))]
    ids, rows = torch.tensor([3, 5, 8], device=DEVICE), torch.arange(3, device=DEVICE)
    for heads in ([HeadsRow(0, 1, 3), HeadsRow(1, 1, 3)], [HeadsRow(2, 2, 2), HeadsRow(0, 1, 1)], [HeadsRow(1, 2, 1)]):
        actual = []
        for model in (plain, graphed):
            model.inputs.fill(segments, ids, rows, [0, 1, 2], heads)
            actual.append(model.forward().clone())
        assert actual[0].shape == actual[1].shape == (3 + sum(entry.num_drafts for entry in heads), VOCAB)
        assert worst_share(actual[1], actual[0]) <= CLOSE
    assert recorder.num_replayed == 3


SAMPLING = (
    SamplingParams(),
    SamplingParams(do_sample=True, temperature=0.7, seed=1),
    SamplingParams(do_sample=True, top_p=0.8, top_k=20, typical_p=0.9, seed=2),
    SamplingParams(do_sample=True, repetition_penalty=1.3, frequency_penalty=0.4, seed=3),
    SamplingParams(logit_bias=((4, 9.0),), presence_penalty=8.0),
    SamplingParams(watermark=True),
)


@pytest.mark.parametrize(("lag", "drafts_on_device"), [(0, False), (1, True)])
def test_a_graph_samples_what_the_same_kernels_sample_outside(lag: int, drafts_on_device: bool) -> None:
    actual = []
    for samples_in_graph in (True, False):
        model, recorder = model_with(num_layers=1, device=DEVICE), CountingRecorder()
        rig = Rig(
            Setup(NUM_PAGES, PAGE_SIZE, 64, 8, commit_lag=lag, network=model, tile=Tile(64, 64),
                  drafts=DraftSettings(8, 1, 8, 4), drafts_on_device=drafts_on_device)
        )  # fmt: skip
        if not samples_in_graph:
            model.inputs.graph_sampling = None
        padding = Padding(MOST_ROWS, MOST_TOKENS, NUM_PAGES)
        model.allocate_kv(NUM_PAGES + 1)
        model.capture(padding, recorder, padding.all(), is_checked=True)
        for index in range(8):
            rig.submit(
                make_request(index, [3, 5 + index, 3, 5 + index, 3], 4 + index % 3, sampling=SAMPLING[index % 5],
                             logprobs=LogprobParams(wanted=index % 2 == 0, raw=index == 2),
                             speculation=Speculation(Method.LOOKUP, 2) if index in (0, 5) else Speculation())
            )  # fmt: skip
            rig.step()
        outputs = rig.run(make_request(8, [3, 5], 2, sampling=SAMPLING[5]))
        actual.append([(entry.token_ids, repr(entry.logprobs)) for _, entry in sorted(outputs.items())])
    assert actual[0] == actual[1]
