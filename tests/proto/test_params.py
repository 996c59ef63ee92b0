"""Parameters of a request: what is written is read again, and `check` knows every range."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.proto import params
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import (
    Grammar,
    LogprobParams,
    Method,
    Pooling,
    Range,
    SamplingParams,
    Schedule,
    Speculation,
    Verification,
    ranges,
)

VOCAB_SIZE = 300
token_ids = st.integers(0, VOCAB_SIZE - 1)
id_lists = st.lists(token_ids, max_size=4).map(tuple)


def single(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers that the wire carries as they are."""
    return st.floats(low, high, width=32)


samplings = st.builds(
    SamplingParams,
    do_sample=st.booleans(),
    temperature=single(0.125, 8),
    top_k=st.integers(0, 2**31 - 1),
    top_p=single(0.125, 1),
    min_p=single(0, 1),
    typical_p=single(0.125, 1),
    repetition_penalty=single(0.125, 8),
    frequency_penalty=single(-2, 2),
    presence_penalty=single(-2, 2),
    logit_bias=st.lists(st.tuples(token_ids, single(-100, 100)), max_size=3).map(tuple),
    watermark=st.booleans(),
    allowed_ids=id_lists,
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=64).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 9),
    min_tokens_stop_ids=id_lists,
    seed=st.integers(0, 2**64 - 1),
)
speculations = st.builds(
    Speculation,
    st.sampled_from(Method),
    st.integers(0, params.MAX_DRAFT_TOKENS),
    st.integers(0, params.ALL_HEADS),
    st.sampled_from(Schedule),
    st.sampled_from(Verification),
    id_lists,
)


@st.composite
def logprobs(draw: st.DrawFn) -> LogprobParams:
    named = draw(id_lists)
    return LogprobParams(
        wanted=draw(st.booleans()),
        alternatives=len(named) or draw(st.integers(0, 256)),
        alternative_ids=named,
        raw=draw(st.booleans()),
        prefill=draw(st.booleans()),
        prefill_alternatives=draw(st.integers(0, 256)),
        prefill_ranks=draw(st.booleans()),
    )


def sent(written: SamplingParams | LogprobParams | Speculation | Grammar | Pooling) -> pb.Submit:
    """The message as it arrives."""
    submit = pb.Submit()
    written.to_wire(submit)
    arrived = pb.Submit()
    arrived.ParseFromString(submit.SerializeToString())
    return arrived


@given(st.one_of(samplings, logprobs(), speculations))
def test_what_is_written_is_read_and_valid(written: SamplingParams | LogprobParams | Speculation) -> None:
    written.check(VOCAB_SIZE)
    assert type(written).from_wire(sent(written)) == written


@pytest.mark.parametrize("written", [Grammar(""), Grammar("g", proposes=True), Pooling(""), Pooling("embed", 3, True)])
def test_what_is_present_is_read(written: Grammar | Pooling) -> None:
    assert type(written).from_wire(sent(written)) == written
    assert type(written).from_wire(pb.Submit()) is None


@pytest.mark.parametrize("neutral", [SamplingParams(), LogprobParams(), Speculation()])
def test_neutral_values_are_valid(neutral: SamplingParams | LogprobParams | Speculation) -> None:
    neutral.check()


@pytest.mark.parametrize(
    ("message", "known"), [(pb.Sampling, SamplingParams), (pb.Logprobs, LogprobParams), (pb.Speculation, Speculation)]
)
def test_every_field_of_a_message_is_known(message: Any, known: type) -> None:
    renamed = {"bias_ids", "bias_values", "mode"}
    names = {field.name for field in fields(known)}
    assert set(message.DESCRIPTOR.fields_by_name) - names <= renamed


def test_every_number_has_a_range() -> None:
    for known in (SamplingParams, LogprobParams, Speculation):
        numbers = {field.name for field in fields(known) if type(field.default) in (int, float)}
        assert set(ranges(known)) == numbers


def beyond(allowed: Range) -> list[float]:
    values = [math.nan]
    values += [] if allowed.gt is None else [allowed.gt, allowed.gt - 1]
    values += [] if allowed.ge is None else [math.nextafter(allowed.ge, -math.inf)]
    values += [] if allowed.lt is None else [allowed.lt]
    values += [] if allowed.le is None else [math.nextafter(allowed.le, math.inf)]
    return values


@pytest.mark.parametrize(
    ("known", "name", "value"),
    [
        (known, name, value)
        for known in (SamplingParams, LogprobParams, Speculation)
        for name, allowed in ranges(known).items()
        for value in beyond(allowed)
    ],
)
def test_what_is_outside_a_range_is_named(known: Any, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is out of range|at most"):
        replace(known(), **{name: value}).check()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (SamplingParams(logit_bias=((1, 101.0),)), "logit_bias of token 1 is out of range"),
        (SamplingParams(logit_bias=((1, math.nan),)), "logit_bias of token 1 is out of range"),
        (SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)), "of the logit bias is outside the vocabulary"),
        (SamplingParams(allowed_ids=(VOCAB_SIZE,)), "of allowed_ids is outside the vocabulary"),
        (SamplingParams(min_tokens_stop_ids=(VOCAB_SIZE,)), "of min_tokens_stop_ids is outside the vocabulary"),
        (SamplingParams(bad_words=((1,), (2, VOCAB_SIZE))), "of bad_words is outside the vocabulary"),
        (SamplingParams(bad_words=((),)), "a bad word must have 1 to 64 tokens"),
        (SamplingParams(bad_words=((1,) * 65,)), "a bad word must have 1 to 64 tokens"),
        (LogprobParams(alternatives=1, alternative_ids=(VOCAB_SIZE,)), "of alternative_ids is outside the vocabulary"),
        (LogprobParams(alternatives=2, alternative_ids=(1,)), "1 alternatives are named, and 2 asked for"),
        (Speculation(prediction_ids=(VOCAB_SIZE,)), "of the prediction is outside the vocabulary"),
    ],
)
def test_other_rules(wrong: SamplingParams | LogprobParams | Speculation, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        wrong.check(VOCAB_SIZE)


def test_a_bias_without_a_value_is_not_read() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        SamplingParams.from_wire(pb.Submit(sampling=pb.Sampling(bias_ids=[1])))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("method", pb.Speculation(method="prophecy")),
        ("schedule", pb.Speculation(schedule="prophecy")),
        ("verification", pb.Speculation(verify="prophecy")),
    ],
)
def test_an_unknown_name_is_not_read(field: str, message: pb.Speculation) -> None:
    with pytest.raises(ValueError, match=f"the speculation {field} prophecy is unknown; known: "):
        Speculation.from_wire(pb.Submit(speculation=message))


def test_the_rule_of_a_range() -> None:
    assert str(Range(gt=0, le=1)) == "> 0 and <= 1"
    assert str(ranges(SamplingParams)["repetition_penalty"]) == ">= 1e-10 and <= 1e+10"
    assert Range(ge=0, lt=2).bounds == {"ge": 0, "lt": 2}
