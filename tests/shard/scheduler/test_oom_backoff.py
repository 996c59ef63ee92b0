from lorikeet.shard.scheduler.budget import CALM_STEPS, OomBackoff


def test_steps_are_halved_and_grow_back() -> None:
    oom_backoff = OomBackoff(512, 64)
    assert not oom_backoff.is_active
    assert oom_backoff.on_oom(300, 20)
    assert (oom_backoff.step_tokens, oom_backoff.max_running, oom_backoff.is_active) == (150, 10, True)
    for _ in range(CALM_STEPS):
        oom_backoff.on_success()
    assert (oom_backoff.step_tokens, oom_backoff.max_running) == (300, 20)
    for _ in range(2 * CALM_STEPS):
        oom_backoff.on_success()
    assert (oom_backoff.step_tokens, oom_backoff.max_running, oom_backoff.is_active) == (512, 64, False)


def test_a_failure_restarts_the_count() -> None:
    oom_backoff = OomBackoff(64, 8)
    oom_backoff.on_oom(64, 8)
    for _ in range(CALM_STEPS - 1):
        oom_backoff.on_success()
    oom_backoff.on_oom(16, 2)
    oom_backoff.on_success()
    assert (oom_backoff.step_tokens, oom_backoff.max_running) == (8, 1)


def test_nothing_is_smaller_than_one_token_or_a_whole_prompt() -> None:
    assert not OomBackoff(64, 8).on_oom(1, 1)
    assert OomBackoff(64, 8).on_oom(2, 1)
    assert not OomBackoff(64, 8, is_chunked=False).on_oom(40, 1)
    assert OomBackoff(64, 8, is_chunked=False).on_oom(40, 2)
