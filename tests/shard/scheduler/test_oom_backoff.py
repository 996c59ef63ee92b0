from lorikeet.shard.scheduler.oom_backoff import CALM_STEPS, Restraint


def test_steps_are_halved_and_grow_back() -> None:
    restraint = Restraint(512, 64)
    assert not restraint.is_felt
    assert restraint.failed(300, 20)
    assert (restraint.step_tokens, restraint.max_running, restraint.is_felt) == (150, 10, True)
    for _ in range(CALM_STEPS):
        restraint.passed()
    assert (restraint.step_tokens, restraint.max_running) == (300, 20)
    for _ in range(2 * CALM_STEPS):
        restraint.passed()
    assert (restraint.step_tokens, restraint.max_running, restraint.is_felt) == (512, 64, False)


def test_a_failure_begins_the_count_anew() -> None:
    restraint = Restraint(64, 8)
    restraint.failed(64, 8)
    for _ in range(CALM_STEPS - 1):
        restraint.passed()
    restraint.failed(16, 2)
    restraint.passed()
    assert (restraint.step_tokens, restraint.max_running) == (8, 1)


def test_nothing_is_smaller_than_one_token_or_a_whole_prompt() -> None:
    assert not Restraint(64, 8).failed(1, 1)
    assert Restraint(64, 8).failed(2, 1)
    assert not Restraint(64, 8, is_chunked=False).failed(40, 1)
    assert Restraint(64, 8, is_chunked=False).failed(40, 2)
