"""One small round of the flood and of the weights against real servers, and what figures they give."""

import pytest

from benchmarks.adapters import fairness
from benchmarks.load import adapted


@pytest.mark.long
def test_a_small_flood(small: adapted.AdaptedBase) -> None:
    (case,) = fairness.flood(base=small, size=fairness.QUICK)
    assert case.error == ""
    calm, flood = case.raw["calm"], case.raw["flood"]
    assert len(calm["first_token_s"]) == len(flood["first_token_s"]) > 0
    assert flood["flooding"] > 5 * calm["flooding"]


@pytest.mark.long
def test_small_shares(small: adapted.AdaptedBase) -> None:
    (case,) = fairness.weights(base=small, size=fairness.QUICK)
    assert case.error == ""
    assert case.raw[fairness.HEAVY] > case.raw[fairness.LIGHT] > 0


def test_distance_from_the_weight() -> None:
    assert fairness.off_weight({"heavy": 270, "light": 100}) == pytest.approx(0.3)
    assert fairness.off_weight({"heavy": 320, "light": 100}) == pytest.approx(0.2)
