"""What a round's raw values say, and when a run says nothing."""

from typing import Any

import pytest

from benchmarks.load.rounds import OURS, VLLM, speedup
from benchmarks.models.limit import Machine, tokens_per_second
from benchmarks.serving.closed_loop import share_of_limit, void

MACHINE = Machine(454e9, 33e9)


def raw(ours: float, theirs: float, clients: int = 8) -> dict[str, Any]:
    """Shares of the limit as a round would tell them."""
    limit = tokens_per_second(MACHINE, clients)
    result = {OURS: {"tokens_per_second": ours * limit}, VLLM: {"tokens_per_second": theirs * limit}}
    return {"clients": clients, "flops": MACHINE.flops, "bytes_per_s": MACHINE.bytes_per_s, **result}


def test_shares_and_ratio() -> None:
    assert share_of_limit(raw(0.72, 0.6)) == pytest.approx(0.72)
    assert share_of_limit(raw(0.72, 0.6), VLLM) == pytest.approx(0.6)
    assert speedup(OURS, VLLM, raw(0.72, 0.6)) == pytest.approx(1.2)


@pytest.mark.parametrize(("clients", "share", "says_nothing"), [(1, 0.56, True), (1, 0.58, False), (32, 0.59, True)])
def test_a_run_with_a_slow_vllm_is_void(clients: int, share: float, says_nothing: bool) -> None:
    assert bool(void([raw(0.9, share, clients)] * 8)) is says_nothing
