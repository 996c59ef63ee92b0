"""Steps that the device has no memory for: computed again in smaller ones, and nothing is lost."""

import pytest

from lorikeet.proto.params import Method, Speculation
from lorikeet.shard.requests.request import FinishReason
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.fake_model import generate_alone
from tests.shard.rig import Rig, Setup, make_request


@pytest.mark.parametrize(
    ("most_tokens", "lag"),
    [
        (3, 0),
        (1, 1),
        pytest.param(1, 0, marks=pytest.mark.long),
        pytest.param(3, 1, marks=pytest.mark.long),
        pytest.param(8, 0, marks=pytest.mark.long),
        pytest.param(8, 1, marks=pytest.mark.long),
    ],
)
def test_a_step_without_memory_is_computed_again_in_smaller_ones(lag: int, most_tokens: int) -> None:
    rig = Rig(Setup(commit_lag=lag, drafts=DraftSettings()))
    rig.watches_kv = True
    prompts = {i: list(range(i, i + 9 + 4 * i)) for i in range(6)}
    drafted = Speculation(Method.LOOKUP, 3)
    rig.submit(*[make_request(i, prompt, 40, speculation=drafted) for i, prompt in prompts.items()])
    rig.step(12)
    rig.model.most_tokens = most_tokens
    rig.step(30)
    assert rig.scheduler.oom_backoff.is_active
    rig.submit(make_request(6, [5] * 30, 20))
    rig.run()
    rig.model.most_tokens = None
    outputs = rig.run(make_request(7, [9] * 8, 400))
    assert not rig.scheduler.oom_backoff.is_active, "step limits stay reduced after a step ran out of memory"
    prompts |= {6: [5] * 30, 7: [9] * 8}
    for i, prompt in prompts.items():
        assert outputs[i].token_ids == generate_alone(prompt, {6: 20, 7: 400}.get(i, 40))


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_request_that_has_no_memory_alone_fails_alone(is_chunked: bool) -> None:
    rig = Rig(Setup(chunked_prefill=is_chunked))
    rig.model.most_tokens = 0 if is_chunked else 20
    rig.submit(make_request(1, list(range(30)), 5))
    outputs = rig.run()
    assert outputs[1].finish_reason is FinishReason.ERROR and outputs[1].retryable
    rig.model.most_tokens = 20
    outputs = rig.run(make_request(2, list(range(15)), 5))
    assert outputs[2].token_ids == generate_alone(list(range(15)), 5)
