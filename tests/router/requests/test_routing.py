"""When a request is identified as the cause of crashes."""

from lorikeet.router.requests.generation import ISOLATION_STEPS, MAX_ISOLATION_STEPS, PoisonRequestTracker


def test_the_first_crash_fails_no_request() -> None:
    poison_tracker = PoisonRequestTracker()
    assert not poison_tracker.record_crash()
    assert poison_tracker.isolation_steps == ISOLATION_STEPS


def test_a_second_crash_while_isolated_identifies_the_request() -> None:
    poison_tracker = PoisonRequestTracker()
    poison_tracker.record_crash()
    poison_tracker.record_steps(ISOLATION_STEPS - 1)
    assert poison_tracker.record_crash()


def test_successful_steps_clear_a_suspect_and_the_next_isolation_is_longer() -> None:
    poison_tracker = PoisonRequestTracker()
    expected = [ISOLATION_STEPS, 4 * ISOLATION_STEPS, 16 * ISOLATION_STEPS]
    for steps in expected:
        assert not poison_tracker.record_crash()
        assert poison_tracker.isolation_steps == steps
        poison_tracker.record_steps(steps)
    for _ in range(10):
        assert not poison_tracker.record_crash()
        poison_tracker.record_steps(poison_tracker.isolation_steps)
    poison_tracker.record_crash()
    assert poison_tracker.isolation_steps == MAX_ISOLATION_STEPS


def test_a_suspicion_does_not_count_as_a_crash() -> None:
    poison_tracker = PoisonRequestTracker()
    poison_tracker.suspect()
    assert not poison_tracker.record_crash()
    assert poison_tracker.record_crash()
