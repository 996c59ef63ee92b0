"""When graphs are captured and how their memory is estimated, on CPU with a fake recorder and fake free memory."""

from dataclasses import replace

import pytest
import torch

from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.graphs import Launch
from lorikeet.shard.startup import capture
from lorikeet.shard.startup.capture import CapturePlan
from tests.shard.model.tape import TapeRecorder
from tests.shard.model.test_graphs import MOST_ROWS, MOST_TOKENS, NUM_PAGES, ReadingAttention, Texts, model_with

ONCE, EACH = 1000, 10


class Compiling(TapeRecorder):
    """The first run allocates memory that is never freed."""

    kept = 0

    def __call__(self, compute: Launch) -> Launch:
        Compiling.kept = ONCE
        return super().__call__(compute)


def test_memory_allocated_once_is_not_attributed_to_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with()
    model.allocate_kv(1)

    def free(_: torch.device) -> int:
        return -Compiling.kept - (0 if model.graphs is None else EACH * model.graphs.num_graphs)

    monkeypatch.setattr(capture, "CudaRecorder", lambda _: Compiling())
    monkeypatch.setattr(capture, "_free", free)
    config = ShardConfig("tiny", "unused", "unix:unused", graph_rows=MOST_ROWS, max_total_tokens=MOST_TOKENS)
    found = capture._measure(config, model, has_adapters=False)
    assert found.num_bytes == EACH * len(Padding(MOST_ROWS, MOST_TOKENS, 0).all())
    assert model.graphs is None


def test_a_shard_runs_without_graphs_unless_they_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "CudaRecorder", lambda _: TapeRecorder())
    monkeypatch.setattr(capture, "_free", lambda _: 0)
    model = model_with(ReadingAttention)
    model.allocate_kv(NUM_PAGES + 1)
    plan = CapturePlan(model, Padding(MOST_ROWS, MOST_TOKENS, 0), num_bytes=0)
    with pytest.raises(ValueError, match=r"--compile.*not permitted"):
        replace(plan, is_required=True).capture(NUM_PAGES)
    plan.capture(NUM_PAGES)
    assert model.graphs is None
    assert Texts(model).step({0: 3}).isfinite().all() and model.inputs.bounds is None
