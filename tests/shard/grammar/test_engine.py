"""Constrained requests in the step loop, over a model that detects every wrong page: outputs match their grammar, and
no draft source, batch, lag or preemption changes one.
"""

import json
import re
import time
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

from lorikeet.proto.params import Grammar, Method, SamplingParams, Speculation, Verification
from lorikeet.shard.grammar import compiler as compiler_module
from lorikeet.shard.grammar import masks, matcher
from lorikeet.shard.grpc.streams import Output
from lorikeet.shard.requests.request import FinishReason, Request, Source
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.fake_model import DraftModel
from tests.shard.grammar import small_tokenizer
from tests.shard.grammar.small_tokenizer import EOS, choice, regex, schema, text_of
from tests.shard.rig import Rig, Setup, copy_of, make_request

POINT = {
    "type": "object",
    "properties": {"one": {"type": "integer", "minimum": 10, "maximum": 99}, "tags": {"enum": ["red", "blue", None]}},
    "required": ["one", "tags"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
GRAMMARS = {
    "object": schema(POINT),
    "list": schema(LIST),
    "regex": regex("[a-f]{3,9}-[0-9]+\\.o"),
    "choice": choice("true", "false", "none"),
}
SAMPLING = (SamplingParams(), SamplingParams(do_sample=True, temperature=1.5, seed=4))
DRAFTING = DraftSettings(has_draft_model=True)
SETUPS = {
    "default": Setup(drafts=DRAFTING, draft=DraftModel(0.5)),
    "lag 1": Setup(drafts=DRAFTING, draft=DraftModel(0.5), commit_lag=1),
    "few pages": Setup(26, drafts=DRAFTING, draft=DraftModel(0.5)),
    "chunks of 7, lag 1": Setup(drafts=DRAFTING, draft=DraftModel(0.5), step_tokens=7, commit_lag=1),
}
SPECULATIONS = {
    "off": Speculation(),
    "lookup": Speculation(Method.LOOKUP, 5),
    "draft": Speculation(Method.DRAFT, 4),
}


def make(number: int, name: str, sampling: SamplingParams, proposes: bool = False, **values: Any) -> Request:
    grammar = Grammar(GRAMMARS[name], proposes)
    stop_ids = frozenset({EOS})
    prompt_ids = [1 + (number * 7 + at) % 40 for at in range(3 + number % 9)]
    return make_request(number, prompt_ids, 60, sampling=sampling, grammar=grammar, stop_ids=stop_ids, **values)


def rig(setup: Setup | None = None) -> Rig:
    return Rig(replace(setup or Setup(), grammars=small_tokenizer.compiler()))


def alone(request: Request) -> Output:
    return rig().run(copy_of(request, 1))[1]


def matches(name: str, output: Output) -> bool:
    text = text_of(output.token_ids)
    if name == "regex":
        return re.fullmatch("[a-f]{3,9}-[0-9]+\\.o", text) is not None
    if name == "choice":
        return text in ("true", "false", "none")
    jsonschema.validate(json.loads(text), {"object": POINT, "list": LIST}[name])
    return True


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("sampling", SAMPLING, ids=("greedy", "sampled"))
def test_an_output_matches_its_grammar_and_ends_with_it(name: str, sampling: SamplingParams) -> None:
    for number in range(1, 6):
        request = make(number, name, replace(sampling, seed=number))
        output = rig().run(request)[number]
        assert output.finish_reason is FinishReason.EOS and EOS not in output.token_ids
        assert matches(name, output), text_of(output.token_ids)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("has_drafts", [True, False], ids=("drafts", "no drafts"))
def test_no_draft_source_and_no_batch_changes_an_output(setup: Setup, has_drafts: bool) -> None:
    requests = [
        make(
            number,
            list(GRAMMARS)[number % 4],
            replace(SAMPLING[number % 2], seed=number),
            proposes=has_drafts and number % 2 == 0,
            speculation=list(SPECULATIONS.values())[number % 3 if has_drafts else 0],
        )
        for number in range(1, 17)
    ]
    expected = {request.key[1]: alone(request) for request in requests}
    found = rig(setup).run(*requests)
    for number, output in expected.items():
        assert found[number].token_ids == output.token_ids
        assert found[number].finish_reason is output.finish_reason


def test_tokens_that_must_follow_are_accepted_drafts() -> None:
    request = make(1, "object", SAMPLING[1], proposes=True)
    output = rig(Setup(drafts=DRAFTING)).run(request)[1]
    plain = alone(request)
    assert output.token_ids == plain.token_ids
    sources = [Source(source) for source in output.sources]
    assert sources.count(Source.GRAMMAR) == output.num_accepted == sum(output.num_drafted) > 10
    assert bytes(output.step_ends).count(1) < len(plain.token_ids) / 2


def test_an_output_is_continued_from_any_token() -> None:
    """As after the loss of a shard, in the middle of an object."""
    request = make(2, "object", SAMPLING[1])
    whole = alone(request)
    assert whole.token_ids[-1] != EOS
    for num_emitted in range(1, len(whole.token_ids) + 1):
        rest = copy_of(request, 1)
        rest.token_ids += whole.token_ids[:num_emitted]
        found = rig().run(rest)[1]
        assert whole.token_ids[:num_emitted] + found.token_ids == whole.token_ids


def test_an_output_that_does_not_match_cannot_be_continued() -> None:
    request = make(2, "object", SAMPLING[0])
    request.token_ids.append(1)
    output = rig().run(request)[2]
    assert output.finish_reason is FinishReason.ERROR and "does not match the grammar" in output.error


def test_a_grammar_that_cannot_be_compiled_fails_alone() -> None:
    bad = make(1, "object", SAMPLING[0])
    bad.grammar = Grammar(regex("(a"))
    good = make(2, "choice", SAMPLING[0])
    outputs = rig().run(bad, good)
    assert outputs[1].finish_reason is FinishReason.ERROR and "cannot be compiled" in outputs[1].error
    assert outputs[2].token_ids == alone(good).token_ids


def test_a_shard_without_a_tokenizer_rejects_grammars() -> None:
    output = Rig().run(make(1, "choice", SAMPLING[0]))[1]
    assert output.finish_reason is FinishReason.ERROR and "no fast tokenizer" in output.error


def test_the_length_may_end_an_output_in_its_middle() -> None:
    request = make(1, "object", SAMPLING[0])
    request.max_new_tokens = 4
    output = rig().run(request)[1]
    assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == 4


@pytest.mark.parametrize("verify", Verification)
def test_drafts_of_a_draft_model_are_truncated(verify: Verification) -> None:
    """The rejection rule gives other texts for a seed, but never one that the grammar refuses."""
    setup = Setup(drafts=DRAFTING, draft=DraftModel(0.5))
    for number in range(1, 6):
        speculation = Speculation(Method.DRAFT, 4, verify=verify)
        name = list(GRAMMARS)[number % 4]
        request = make(number, name, replace(SAMPLING[1], seed=number), speculation=speculation)
        output = rig(setup).run(request)[number]
        assert output.finish_reason is FinishReason.EOS and matches(name, output)


def test_a_panic_of_the_library_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As a panic of the library: no subclass of Exception."""

    fill = masks.fill_next_token_bitmask_par
    requests = [make(number, "object", SAMPLING[1]) for number in (1, 2, 3)]
    expected = [alone(request) for request in requests]

    def panic(executor: Any, jobs: Any, bitmask: Any) -> None:
        guilty = requests[0].constraint
        if any(isinstance(guilty, matcher.GrammarMatcher) and each is guilty.matcher for each, _ in jobs):
            raise Panic
        fill(executor, jobs, bitmask)

    monkeypatch.setattr(masks, "fill_next_token_bitmask_par", panic)
    found = rig().run(*requests)
    assert found[1].finish_reason is FinishReason.ERROR and "cannot be continued: Panic" in found[1].error
    for number in (2, 3):
        assert found[number].token_ids == expected[number - 1].token_ids


def test_requests_of_one_grammar_do_not_fill_the_lexer_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a matcher share a lexer of limited size: a request fails only if it would fail alone."""
    monkeypatch.setattr(compiler_module, "GRAMMAR_LIMITS", LLParserLimits(max_lexer_states=250))
    grammar = Grammar(regex("([abc]*a[abc]{7})?[abc]{40}"))
    sampling = [replace(SAMPLING[1], seed=number) for number in range(1, 13)]
    requests = [
        make_request(number, [number], 60, sampling=each, grammar=grammar, stop_ids=frozenset({EOS}))
        for number, each in enumerate(sampling, 1)
    ]
    expected = {request.key[1]: alone(request) for request in requests}
    assert FinishReason.ERROR not in {output.finish_reason for output in expected.values()}
    found = rig().run(*requests)
    for number, output in expected.items():
        assert (found[number].error, found[number].token_ids) == ("", output.token_ids)


@pytest.mark.parametrize("is_slow", [False, True])
def test_forced_tokens_that_take_long_are_not_proposed(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "MAX_FORCED_S", 0.0 if is_slow else 60.0)
    constraint = small_tokenizer.compiler().match(Grammar(GRAMMARS["object"], proposes=True))
    constraint.start()
    begin = constraint.forced_ids()
    digits = [1 + small_tokenizer.LETTERS.index(letter) for letter in "42"]
    for number, token_id in enumerate(begin + digits):
        assert constraint.forced_ids() == begin[number:]
        constraint.commit(token_id)
    assert text_of(begin) == '{"one":'
    assert text_of(constraint.forced_ids()) == ("" if is_slow else ',"tags":')


def test_a_failed_forward_pass_waits_for_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread would read the matchers of requests that are already gone."""
    made, ended = rig(), list[bool]()
    fill = masks.GrammarMasks._fill

    def slow(self: masks.GrammarMasks, jobs: Any) -> Any:
        time.sleep(0.2)
        ended.append(True)
        return fill(self, jobs)

    def failing() -> Any:
        raise RuntimeError("the forward pass failed")

    monkeypatch.setattr(masks.GrammarMasks, "_fill", slow)
    monkeypatch.setattr(made.model, "forward", failing)
    made.submit(make(1, "object", SAMPLING[0]))
    made.engine.step()
    assert ended
