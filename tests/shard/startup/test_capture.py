"""When graphs are captured and what they are expected to take, on CPU: recorder and free memory are a test's own."""

import pytest
import torch

from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.graphs import Launch
from lorikeet.shard.startup import capture
from lorikeet.shard.startup.capture import Captured
from tests.shard.model.tape import TapeRecorder
from tests.shard.model.test_graphs import MOST_ROWS, MOST_TOKENS, NUM_PAGES, ReadingAttention, Texts, model_with

ONCE, EACH = 1000, 10


class Compiling(TapeRecorder):
    """The first run of all takes memory for good."""

    kept = 0

    def record(self, compute: Launch) -> Launch:
        Compiling.kept = ONCE
        return super().record(compute)


def test_what_is_taken_once_is_no_part_of_what_graphs_take(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_shard_goes_without_graphs_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "CudaRecorder", lambda _: TapeRecorder())
    monkeypatch.setattr(capture, "_free", lambda _: 0)
    model = model_with(ReadingAttention)
    model.allocate_kv(NUM_PAGES + 1)
    facts = (model, MOST_ROWS, MOST_TOKENS, False, 0)
    with pytest.raises(ValueError, match=r"--compile.*not permitted"):
        Captured(*facts, is_asked=True).capture(NUM_PAGES)
    Captured(*facts).capture(NUM_PAGES)
    assert model.graphs is None
    assert Texts(model).step({0: 3}).isfinite().all() and model.inputs.bounds is None
