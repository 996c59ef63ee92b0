"""Random models, and the options that are rejected."""

from pathlib import Path

import pytest
import torch

from benchmarks.cuda import engines
from benchmarks.cuda.setup import SMOKE
from tests.shard.engine.harness import EngineRequest, Run, StepResult


def test_a_setting_that_the_shard_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no setting telepathy"):
        engines.configured(SMOKE, tmp_path, telepathy=True)


def test_the_same_seed_gives_the_same_numbers() -> None:
    tables = [engines.load(SMOKE, SMOKE.large)[1].network.get_input_embeddings().weight for _ in range(2)]
    assert torch.equal(*tables) and tables[0].float().std() > 0


def test_a_step_is_timed_while_all_requests_run() -> None:
    def run(*moments: float) -> Run:
        return Run(
            EngineRequest([1], 9),
            0.0,
            [StepResult([7], 0, 0, moment, gap_us=round(1e5 * moment)) for moment in moments],
        )

    result = engines.step_of([run(1.0, 2.0, 3.0, 4.0), run(2.0, 3.0, 4.0, 5.0)])
    assert result == {"seconds": 1.0, "steps": 2, "tokens": 4, "tokens_per_second": 2.0, "gap": 0.1}
    with pytest.raises(RuntimeError, match="at once"):
        engines.step_of([run(1.0, 2.0), run(3.0, 4.0)])
