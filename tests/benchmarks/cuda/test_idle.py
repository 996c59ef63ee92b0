"""Time that nothing covers."""

from benchmarks.cuda.timing import between


def test_gaps_between_spans_that_overlap() -> None:
    assert between([(5.0, 9.0), (0.0, 2.0), (1.0, 4.0), (6.0, 7.0), (10.0, 11.0)]) == (2.0, 11.0)


def test_nothing_at_all() -> None:
    assert between([]) == (0.0, 0.0)
