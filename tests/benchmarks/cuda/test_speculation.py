"""Figures of speculation from a round."""

import pytest

pytest.importorskip("triton")  # the modules below import it

from benchmarks.cuda.check import speculation

PLAIN = {"seconds": 0.010, "tokens_per_second": 100.0}
ROUND = {
    "width": 4,
    "weight_ratio": 0.1,
    "off 1": PLAIN,
    "wide 1": {"verifying": 0.010, "accepting": 0.0005},
    "drafted 1": {"tokens_per_second": 250.0, "tau": 4.0, "proposing": 0.004, "verifying": 0.0105, "accepting": 0.0005},
    "heads 1": {"seconds": 0.0125, "verifying": 0.0109, "accepting": 0.0005},
    "as wide without heads 1": {"verifying": 0.0102, "accepting": 0.0005},
    "auto 1": {"tokens_per_second": 260.0},
    "rejected 1": {"tokens_per_second": 99.0},
}


def test_costs_are_multiples_of_a_plain_step() -> None:
    assert speculation.cost(ROUND) == pytest.approx(1.05)
    assert speculation.heads_cost(ROUND) == pytest.approx(11.4 / 10.7)
    assert speculation.heads_step(ROUND) == pytest.approx(1.25)
    assert speculation.draft_cost(ROUND) == pytest.approx(1.0)


def test_efficiency_is_speed_over_what_acceptance_and_costs_allow() -> None:
    assert speculation.speed_up(1, ROUND) == 2.5
    assert speculation.efficiency(1, ROUND) == pytest.approx(2.5 / (4.0 / 1.5))


def test_a_schedule_has_the_figure_of_its_worst_load() -> None:
    assert speculation.worst_schedule((1,), ROUND) == pytest.approx(0.99)
