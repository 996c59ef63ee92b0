"""Speculative decoding changes no text, over a model that detects every wrong page, slot and position."""

import random
from dataclasses import replace

import pytest

from lorikeet.proto.params import LogprobParams, Method, SamplingParams, Speculation
from lorikeet.shard.grpc.streams import Details, Output
from lorikeet.shard.requests.request import FinishReason, Request, Source
from tests.shard.fake_model import VOCAB_SIZE
from tests.shard.rig import SAMPLED, SCORED, Rig, Setup, copy_of, make_request
from tests.shard.sampling.oracle import Case, excluded
from tests.shard.speculation.scripted_drafts import ScriptedDrafts, script_device

SETUPS = {
    "default": Setup(),
    "chunks of 7": Setup(step_tokens=7),
    "lag 1": Setup(commit_lag=1),
    "lag 1, drafts on the device": Setup(commit_lag=1, drafts_on_device=True),
    "few pages": Setup(num_pages=26),
    "few pages, lag 1, chunks of 7, no prefixes": Setup(26, commit_lag=1, step_tokens=7, prefix_caching=False),
    "few pages, lag 1, drafts on the device, chunks of 7": Setup(
        26, commit_lag=1, step_tokens=7, drafts_on_device=True
    ),
    "pages of one token": Setup(page_size=1),
    "pages of one token, lag 1, drafts on the device": Setup(page_size=1, commit_lag=1, drafts_on_device=True),
    "one at a time": Setup(max_running=1),
}
DISTRIBUTIONS = {
    "greedy": {},
    "sampled, penalised": {"sampling": SAMPLED},
    "all penalties": {
        "sampling": SamplingParams(True, 0.9, 20, 0.95, 0.01, 0.97, 1.2, 0.4, 0.3, ((5, 1.0), (9, -2.0)), seed=3)
    },
    "watermark": {"sampling": SamplingParams(do_sample=True, watermark=True, seed=8)},
    "greedy, penalised, watermark": {"sampling": SamplingParams(repetition_penalty=1.5, watermark=True)},
    "log probabilities": {"sampling": replace(SAMPLED, watermark=True), "logprobs": SCORED},
    "processed log probabilities": {"sampling": SAMPLED, "logprobs": LogprobParams(wanted=True, alternatives=3)},
}
MASKED = SamplingParams(
    do_sample=True,
    temperature=1.3,
    allowed_ids=tuple(range(48)),
    bad_words=(
        *((first, last) for first in range(48) for last in range(first % 5, 48, 5)),
        *((first, second, 7) for first in range(0, 48, 12) for second in range(48)),
        (11,),
    ),
    min_tokens=12,
    min_tokens_stop_ids=(7, 8),
    seed=4,
)
DISTRIBUTIONS |= {
    "masks": {"sampling": MASKED, "logprobs": SCORED, "stop_ids": frozenset({7, 8})},
    "masks, greedy": {"sampling": replace(MASKED, do_sample=False), "stop_ids": frozenset({7, 8})},
    "masks, penalties": {"sampling": replace(MASKED, repetition_penalty=1.3), "stop_ids": frozenset({7, 8})},
}
SOURCES = {Source.LOOKUP, Source.RESAMPLE, Source.BONUS}
SAMPLE = (
    ("default", 0.0),
    ("few pages, lag 1, chunks of 7, no prefixes", 0.7),
    ("lag 1, drafts on the device", 0.7),
    ("few pages, lag 1, drafts on the device, chunks of 7", 1.0),
)


def make_mix(**values: object) -> list[Request]:
    """Twelve requests: shared beginnings, lengths from 1 to 40, widths from 0 to 10."""
    rng = random.Random(6)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(30)] for _ in range(3)]
    requests = []
    for i in range(12):
        prompt = stems[i % 3][: rng.randrange(31)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 10))]
        width = Speculation(Method.LOOKUP, (0, 1, 3, 5, 10)[i % 5]) if i % 4 else Speculation()
        requests.append(make_request(i, prompt, rng.randrange(1, 40), speculation=width, **values))
    return requests


def texts_alone(requests: list[Request]) -> dict[int, Output]:
    """The outputs of the requests alone, without drafts."""
    return {r.key[1]: Rig().run(copy_of(r, r.key[1]))[r.key[1]] for r in requests}


def mixed_distributions() -> list[Request]:
    requests = make_mix(stop_ids=frozenset({7}))
    for request, values in zip(requests, [*DISTRIBUTIONS.values(), *DISTRIBUTIONS.values()], strict=False):
        for name, value in values.items():
            setattr(request, name, value)
    return requests


def assert_equal(found: Output, alone: Output) -> None:
    assert found.token_ids == alone.token_ids
    assert found.finish_reason is alone.finish_reason
    assert found.logprobs == pytest.approx(alone.logprobs, nan_ok=True)
    mine, its = found.details or Details(), alone.details or Details()
    assert mine.alternative_ids == its.alternative_ids
    assert mine.alternative_logprobs == pytest.approx(its.alternative_logprobs)
    assert mine.prefill_logprobs == pytest.approx(its.prefill_logprobs)


def assert_accounts(found: Output) -> None:
    """Every token has one source, and they add up."""
    sources = [Source(source) for source in found.sources]
    assert len(sources) == len(found.token_ids) == len(found.step_ends)
    assert sources[0] is Source.PREFILL and Source.PREFILL not in sources[1:]
    assert sources.count(Source.LOOKUP) == found.num_accepted <= sum(found.num_drafted)
    assert found.step_ends[-1] == 1
    for source, ends_before in zip(sources[1:], found.step_ends, strict=False):
        assert source in SOURCES or ends_before  # a token of a step without drafts is the only one of its step


@pytest.mark.parametrize(
    ("setup", "chance"),
    [
        pytest.param(setup, chance, id=f"{name}-{chance}", marks=() if (name, chance) in SAMPLE else pytest.mark.long)
        for name, setup in SETUPS.items()
        for chance in (0.0, 0.7, 1.0)
    ],
)
def test_every_text_is_what_it_is_without(setup: Setup, chance: float) -> None:
    requests = mixed_distributions()
    alone = texts_alone(requests)
    texts = {r.key[1]: r.token_ids + alone[r.key[1]].token_ids for r in requests}
    rig = Rig(replace(setup, drafts=ScriptedDrafts(texts=texts, chance=chance)))
    script_device(rig, texts, chance)
    outputs = rig.run(*requests)
    for request in requests:
        assert_equal(outputs[request.key[1]], alone[request.key[1]])
        assert_accounts(outputs[request.key[1]])
    num_accepted = sum(output.num_accepted for output in outputs.values())
    assert (num_accepted > 20) if chance else (num_accepted < 20)
    assert sum(sum(output.num_drafted) for output in outputs.values()) > 80


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(values, id=name, marks=() if name in ("greedy", "all penalties", "masks") else pytest.mark.long)
        for name, values in DISTRIBUTIONS.items()
    ],
)
def test_drafts_change_no_distribution(values: dict[str, object]) -> None:
    requests = make_mix(**values)
    alone = texts_alone(requests)
    texts = {r.key[1]: r.token_ids + alone[r.key[1]].token_ids for r in requests}
    outputs = Rig(Setup(drafts=ScriptedDrafts(texts=texts, chance=0.8))).run(*requests)
    for request in requests:
        assert_equal(outputs[request.key[1]], alone[request.key[1]])


@pytest.mark.parametrize("setup", [Setup(), Setup(commit_lag=1, num_pages=26)], ids=["lag 0", "lag 1, few pages"])
def test_no_masked_token_is_emitted(setup: Setup) -> None:
    requests = make_mix(sampling=MASKED, stop_ids=frozenset({7, 8}))
    free = make_mix(sampling=SamplingParams(do_sample=True, temperature=1.3, seed=4))
    outputs, unmasked = Rig(setup).run(*requests), Rig(setup).run(*free)
    assert {breaks_mask(output.token_ids) for output in outputs.values()} == {False}
    assert sum(breaks_mask(output.token_ids) for output in unmasked.values()) > 6
    ends = [len(output.token_ids) for output in outputs.values() if output.finish_reason is FinishReason.EOS]
    assert ends and min(ends) > MASKED.min_tokens


def breaks_mask(output: list[int]) -> bool:
    case = Case(
        allowed_ids=MASKED.allowed_ids,
        bad_words=MASKED.bad_words,
        min_tokens=MASKED.min_tokens,
        min_tokens_stop_ids=MASKED.min_tokens_stop_ids,
    )
    return any(token in excluded(case, output[:at], VOCAB_SIZE) for at, token in enumerate(output))


def test_masks_that_exclude_every_token_end_only_their_request() -> None:
    nothing = make_request(1, [1, 2], 5, sampling=SamplingParams(allowed_ids=(3,), bad_words=((3,),)))
    outputs = Rig().run(nothing, make_request(2, [1, 2], 5))
    assert "exclude every token" in outputs[1].error
    assert len(outputs[2].token_ids) == 5 and not outputs[2].error


def test_accepted_drafts_take_fewer_steps() -> None:
    request = make_request(1, [1, 2, 3], 40, speculation=Speculation(Method.LOOKUP, 3))
    text = [1, 2, 3, *Rig().run(copy_of(request, 1))[1].token_ids]
    rig = Rig(Setup(drafts=ScriptedDrafts(texts={1: text}, chance=1.0)))
    output = rig.run(request)[1]
    assert rig.model.num_steps == 1 + 39 // 4 + 1  # the last step has fewer drafts
    assert output.num_accepted == sum(output.num_drafted) == 39 - 10
    assert rig.model.num_tokens == 3 + 39


def test_with_many_running_nothing_is_drafted() -> None:
    requests = [make_request(i, [i], 20, speculation=Speculation(Method.LOOKUP, 3)) for i in range(4)]
    texts = {i: [i] * 30 for i in range(4)}
    outputs = Rig(Setup(drafts=ScriptedDrafts(max_batch_size=3, texts=texts))).run(*requests)
    assert not any(output.num_drafted for output in outputs.values())


def test_bad_logits_after_a_draft_end_the_request_at_the_same_token() -> None:
    request = make_request(1, [1, 2, 3], 30, speculation=Speculation(Method.LOOKUP, 5))
    text = Rig().run(copy_of(request, 1))[1].token_ids
    poison = next(token for at, token in enumerate(text) if at > 4 and token not in text[:at] + [1, 2, 3])
    alone, drafting = Rig(), Rig(Setup(drafts=ScriptedDrafts(texts={1: [1, 2, 3, *text]}, chance=1.0)))
    alone.model.poison = drafting.model.poison = poison
    expected, found = alone.run(copy_of(request, 1))[1], drafting.run(request)[1]
    assert found.token_ids == expected.token_ids == text[: text.index(poison) + 1]
    assert found.error == expected.error != ""
