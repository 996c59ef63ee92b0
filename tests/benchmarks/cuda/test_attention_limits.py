"""From times of both kernels to the limits of the table."""

import pytest

pytest.importorskip("triton")  # the modules below import it

from benchmarks.cuda.check.kernels import limits_of
from benchmarks.cuda.setup import SMOKE, Setup, limit_steps
from lorikeet.shard.attention.kernel_limits import Limit


def times(triton: float, varlen: float) -> dict[str, float]:
    return {"triton": triton, "varlen": varlen}


def test_a_limit_is_the_longest_query_up_to_which_the_paged_kernel_is_as_fast() -> None:
    found = {
        (512, 1024): times(1.0, 1.0),
        (1024, 1024): times(2.0, 3.0),
        (512, 8192): times(1.0, 2.0),
        (1024, 8192): times(3.0, 2.0),
        (2048, 8192): times(3.0, 4.0),  # beyond a query for which it is slower
        (512, 32768): times(9.0, 1.0),  # never below what captured steps have
    }
    assert limits_of(found) == [Limit(1024, 1024), Limit(8192, 512), Limit(None, 512)]


def test_the_grid_has_every_query_length_up_to_every_context() -> None:
    pairs = [(step.tokens, step.context) for step in limit_steps(Setup())]
    assert len(pairs) == len(set(pairs)) == 2 + 5 + 5 and all(query <= context for query, context in pairs)
    assert all(step.requests == 1 for step in limit_steps(Setup())) and limit_steps(SMOKE)
