"""Which steps count as next to a swap."""

import pytest

from benchmarks.cuda import swap
from benchmarks.cuda.swap import Met


def test_the_steps_between_a_request_and_its_first_token_but_for_its_own() -> None:
    times = [0.0, 1.0, 2.0, 3.5, 4.5, 8.5]  # steps of 1, 1, 1.5, 1 and 4
    met = {"missing": [Met(2.1, 8.5)], "resident": [Met(0.1, 2.0)]}
    raw = swap.summary(times, met)
    assert raw["during"] == [1.5]
    assert raw["quiet"] == [1.0]
    assert raw["missing"] == [pytest.approx(6.4)]
    assert swap.lengthening(raw) == 1.5
    assert swap.longest(raw) == 1.5
    assert swap.later_ms(raw) == pytest.approx(4500.0)


def test_a_swap_within_one_step_lengthens_no_step() -> None:
    raw = swap.summary([0.0, 1.0, 2.0], {"missing": [Met(1.1, 2.0)], "resident": [Met(0.1, 1.0)]})
    assert raw["during"] == []
    assert swap.lengthening(raw) == swap.longest(raw) == 1.0
