"""When a request is said to be what ends shards."""

from lorikeet.router.requests.crash_suspect import LONGEST, TRIAL, Suspicion


def test_the_first_end_is_nobody_s_fault() -> None:
    suspicion = Suspicion()
    assert not suspicion.blamed()
    assert suspicion.num_alone == TRIAL


def test_a_second_one_is_where_it_was_alone() -> None:
    suspicion = Suspicion()
    suspicion.blamed()
    suspicion.stepped(TRIAL - 1)
    assert suspicion.blamed()


def test_steps_that_end_well_clear_it_and_the_next_trial_is_longer() -> None:
    suspicion = Suspicion()
    expected = [TRIAL, 4 * TRIAL, 16 * TRIAL]
    for steps in expected:
        assert not suspicion.blamed()
        assert suspicion.num_alone == steps
        suspicion.stepped(steps)
    for _ in range(10):
        assert not suspicion.blamed()
        suspicion.stepped(suspicion.num_alone)
    suspicion.blamed()
    assert suspicion.num_alone == LONGEST


def test_a_doubt_is_no_end() -> None:
    suspicion = Suspicion()
    suspicion.doubted()
    assert not suspicion.blamed()
    assert suspicion.blamed()
