"""The search for the highest rate: what a probe says and which one counts."""

from benchmarks.load.rounds import OURS, VLLM
from benchmarks.serving.open_loop import FIRST_TOKEN_S, highest_rate, holds, over_vllm


def probe(rate: float, slow: int) -> dict[str, object]:
    return {"rate": rate, "first_token_s": [FIRST_TOKEN_S + 0.1] * slow + [0.3] * (60 - slow)}


def test_one_late_first_token_of_sixty_is_the_99th_percentile() -> None:
    assert holds(probe(1.0, 0))
    assert not holds(probe(1.0, 1))


def test_the_best_rate_that_held_counts() -> None:
    assert highest_rate("ours", {"ours": [probe(1.25, 3), probe(0.75, 0), probe(1.0, 0)]}) == 1.0
    assert highest_rate("ours", {"ours": [probe(1.25, 3)]}) == 0.0


def test_the_best_rates_are_compared() -> None:
    held = {OURS: [probe(2.0, 0), probe(3.0, 0)], VLLM: [probe(2.0, 0), probe(2.25, 9)]}
    assert over_vllm(held) == 1.5
    assert over_vllm({**held, VLLM: [probe(0.25, 9)]}) == 0.0
