"""Steps under LoRAX's names: each counts once, whatever messages carry it."""

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.metrics.router import DECODE, PREFILL, StepMetrics

BUSY = pb.Load(num_running=2, step_ms=20, step_tokens=2)


def message(step: int, load: pb.Load = BUSY, has_outputs: bool = True) -> pb.StepOutput:
    return pb.StepOutput(step=step, load=load, outputs=[pb.RequestOutput()] if has_outputs else [])


def counts(steps: StepMetrics) -> list[dict[str, float]]:
    """Those above 0 of all steps, successes and failures."""
    counters = (steps.count, steps.success, steps.failure)
    return [{name: value for name, value in counter.values.items() if value} for counter in counters]


def started(step: int = 0) -> StepMetrics:
    """Connected to a shard whose last step was `step`."""
    steps = StepMetrics([0.01, 0.1])
    steps.observe(message(step, has_outputs=False), 0, 0)
    return steps


def test_a_heartbeat_of_an_idle_shard_counts_nothing() -> None:
    steps = started(7)
    steps.observe(message(8), 2, 0)
    before = counts(steps)
    for _ in range(5):
        assert steps.observe(message(8, pb.Load(step_ms=20, step_tokens=9), has_outputs=False), 0, 0) == 0
    assert counts(steps) == before == [{DECODE: 1}, {DECODE: 1}, {}]


def test_steps_before_the_connection_are_not_counted() -> None:
    assert counts(started(1000)) == [{}, {}, {}]


def test_a_message_of_several_steps_counts_them_all() -> None:
    steps = started()
    steps.has_ended_prompt = True
    assert steps.observe(message(5), 10, 0) == 5
    assert counts(steps) == [{PREFILL: 1, DECODE: 4}, {PREFILL: 1, DECODE: 4}, {}]
    assert steps.observe(message(5), 1, 0) == 0  # the second part of one that was split
    assert steps.durations[DECODE].count == 4


def test_the_last_token_of_the_last_request_is_decoded() -> None:
    steps = started()
    steps.observe(message(1, pb.Load(num_running=0, step_ms=20, step_tokens=1)), 1, 0)
    assert counts(steps)[0] == {DECODE: 1}


def test_a_part_of_a_prompt_is_prefilled() -> None:
    steps = started()
    steps.observe(message(1, pb.Load(num_running=1, step_ms=20, step_tokens=512), has_outputs=False), 0, 0)
    assert counts(steps)[0] == {PREFILL: 1}


def test_a_failed_step_is_neither_a_success_nor_timed() -> None:
    steps = started()
    steps.has_failed = True
    steps.observe(message(1), 0, 0)
    steps.observe(message(2), 2, 0)
    assert counts(steps) == [{DECODE: 2}, {DECODE: 1}, {DECODE: 1}]
    assert steps.durations[DECODE].count == 1


def test_shards_are_counted_apart_and_start_anew() -> None:
    steps = started(3)
    steps.observe(message(50, has_outputs=False), 0, 1)
    steps.observe(message(4), 1, 0)
    steps.observe(message(51), 1, 1)
    steps.forget(0)
    steps.observe(message(1), 1, 0)
    assert counts(steps)[0] == {DECODE: 3}
