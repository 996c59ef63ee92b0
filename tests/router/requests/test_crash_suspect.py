"""When a request is said to be what ends shards."""

from lorikeet.router.requests.crash_suspect import LONGEST, TRIAL, PoisonRequestTracker


def test_the_first_end_is_nobody_s_fault() -> None:
    poison_tracker = PoisonRequestTracker()
    assert not poison_tracker.convicted()
    assert poison_tracker.isolation_steps == TRIAL


def test_a_second_one_is_where_it_was_alone() -> None:
    poison_tracker = PoisonRequestTracker()
    poison_tracker.convicted()
    poison_tracker.stepped(TRIAL - 1)
    assert poison_tracker.convicted()


def test_steps_that_end_well_clear_it_and_the_next_trial_is_longer() -> None:
    poison_tracker = PoisonRequestTracker()
    expected = [TRIAL, 4 * TRIAL, 16 * TRIAL]
    for steps in expected:
        assert not poison_tracker.convicted()
        assert poison_tracker.isolation_steps == steps
        poison_tracker.stepped(steps)
    for _ in range(10):
        assert not poison_tracker.convicted()
        poison_tracker.stepped(poison_tracker.isolation_steps)
    poison_tracker.convicted()
    assert poison_tracker.isolation_steps == LONGEST


def test_a_doubt_is_no_end() -> None:
    poison_tracker = PoisonRequestTracker()
    poison_tracker.suspected()
    assert not poison_tracker.convicted()
    assert poison_tracker.convicted()
