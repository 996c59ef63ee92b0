"""How many prompt tokens a crowd may have in a step."""

from pathlib import Path

import pytest

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.inbox import Inbox
from lorikeet.shard.grpc.outbox import Outbox
from lorikeet.shard.model import load_model
from lorikeet.shard.startup import prefill_calibration as crowd
from lorikeet.shard.startup.build import build_engine
from tests import tiny


@pytest.mark.parametrize(
    ("plain", "mixed", "extra", "wanted"),
    [
        (0.020, 0.084, 64, 30),  # a millisecond a token
        (0.021, 0.045, 64, 84),
        (0.020, 0.020, 64, crowd.MOST),  # tokens that cost nothing
        (0.020, 0.019, 64, crowd.MOST),
        (0.001, 0.101, 64, crowd.LEAST),
    ],
)
def test_such_prompts_lengthen_a_step_by_a_bounded_part(plain: float, mixed: float, extra: int, wanted: int) -> None:
    assert crowd.tokens(plain, mixed, extra) == wanted


def test_what_is_timed_fits_the_shortest_requests(tmp_path: Path) -> None:
    config = ShardConfig("tiny", str(tiny.make("llama", tmp_path / "base")), "unix:/dev/null", max_total_tokens=5)
    model = load_model(config)
    model.allocate_kv(1)
    assert crowd.LEAST <= crowd.measure(model, 5) <= crowd.MOST


def test_a_shard_plans_by_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tiny.make("llama", tmp_path / "base"))
    config = ShardConfig("tiny", base, "unix:/dev/null", max_total_tokens=64, num_pages=8)
    asked = []
    monkeypatch.setattr(crowd, "measure", lambda model, num_tokens: asked.append(num_tokens) or 77)
    engine = build_engine(config, load_model(config), Inbox(), Outbox())
    assert engine.scheduler.limits.adapter_prefill_tokens == 77
    assert asked == [64]
