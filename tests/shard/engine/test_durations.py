"""What a step should take."""

from lorikeet.shard.engine.durations import NUM_SAMPLES, Durations


def test_nothing_is_expected_before_anything_was_seen() -> None:
    assert Durations().expected(5) == 0.0


def test_one_disturbed_step_counts_for_nothing() -> None:
    durations = Durations()
    for seconds in (0.010, 0.200, 0.012, 0.011):
        durations.observe(4, seconds)
    assert durations.expected(4) == 0.011


def test_what_was_seen_long_ago_is_forgotten() -> None:
    durations = Durations()
    durations.observe(4, 9.0)
    for _ in range(NUM_SAMPLES):
        durations.observe(4, 0.010)
    assert durations.expected(4) == 0.010


def test_counts_alike_share_what_was_seen_and_others_take_the_next_smaller() -> None:
    durations = Durations()
    durations.observe(4, 0.012)
    durations.observe(64, 0.070)
    assert durations.expected(66) == 0.070
    assert durations.expected(40) == 0.012
    assert durations.expected(1000) == 0.070
    assert durations.expected(1) == 0.012
