"""The per-adapter prefill budget."""

from pathlib import Path

import pytest

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.inbox import Inbox
from lorikeet.shard.grpc.outbox import Outbox
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.startup import prefill_calibration as calibration
from lorikeet.shard.startup.build import build_engine
from tests import tiny


@pytest.mark.parametrize(
    ("plain", "mixed", "extra", "wanted"),
    [
        (0.020, 0.084, 64, 30),  # a millisecond a token
        (0.021, 0.045, 64, 84),
        (0.020, 0.020, 64, calibration.MAX_TOKENS),  # tokens that cost nothing
        (0.020, 0.019, 64, calibration.MAX_TOKENS),
        (0.001, 0.101, 64, calibration.MIN_TOKENS),
    ],
)
def test_the_budget_bounds_the_time_of_prompts(plain: float, mixed: float, extra: int, wanted: int) -> None:
    assert calibration.budget(plain, mixed, extra) == wanted


def test_calibration_fits_the_shortest_requests(tmp_path: Path) -> None:
    config = ShardConfig("tiny", str(tiny.make("llama", tmp_path / "base")), "unix:/dev/null", max_total_tokens=5)
    model = load_model(config)
    model.allocate_kv(1)
    found = calibration.measure(model, 5)
    assert calibration.MIN_TOKENS <= found.budget <= calibration.MAX_TOKENS
    assert [step[:2] for step in found.steps] == [(0, 8), (5, 13)]


def test_the_scheduler_uses_the_calibrated_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tiny.make("llama", tmp_path / "base"))
    config = ShardConfig("tiny", base, "unix:/dev/null", max_total_tokens=64, num_pages=8)
    measured = []

    def measure(model: Model, num_tokens: int) -> calibration.Calibration:
        measured.append(num_tokens)
        return calibration.Calibration(77, [(0, 8, 0.04), (64, 72, 0.144)])

    monkeypatch.setattr(calibration, "measure", measure)
    engine = build_engine(config, load_model(config), Inbox(), Outbox())
    assert engine.scheduler.limits.adapter_prefill_tokens == 77
    assert engine.scheduler.prompt_chunks.choose(64, num_decoding=1) == 34  # 70 ms at 2 ms for each token
    assert measured == [64]
