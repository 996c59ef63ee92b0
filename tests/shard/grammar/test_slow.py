"""Grammars that take long to match: no step waits for one, its output is the same, and one that takes too long ends."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from lorikeet.proto.grammars import TOO_SLOW
from lorikeet.proto.params import Grammar, SamplingParams
from lorikeet.shard.grammar import compiler as compiler_module
from lorikeet.shard.grammar import matcher
from lorikeet.shard.grammar.compiler import GrammarCompiler
from lorikeet.shard.grpc.streams import StreamEnded
from lorikeet.shard.requests.request import FinishReason, Request
from tests.shard.grammar import small_tokenizer
from tests.shard.grammar.small_tokenizer import lark, regex
from tests.shard.grammar.test_engine import DRAFTING, GRAMMARS, SAMPLING, alone, make, rig
from tests.shard.rig import EPOCH, Rig, Setup, make_request

AMBIGUOUS = lark('start: e "y"\ne: e e | e "a" e | "a" | "b" | ""\n')


class Held(small_tokenizer.Immediate):
    """Takes in slow tokens only when `let` is called."""

    def __init__(self) -> None:
        super().__init__(small_tokenizer.tokenizer, lambda: None)
        self.held: list[tuple[Callable[[], bool], Future[bool]]] = []

    def _submit(self, caller: str, work: Callable[[], bool]) -> Future[bool]:
        self.held.append((work, Future()))
        return self.held[-1][1]

    def let(self) -> None:
        for work, running in self.held:
            running.set_result(work())
        self.held = []


@pytest.fixture
def every_token_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "FREE_S", -1.0)
    monkeypatch.setattr(matcher, "APART_S", -1.0)
    monkeypatch.setattr(matcher, "MAX_MATCHING_S", 1e9)


@pytest.mark.usefixtures("every_token_is_slow")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("has_threads", [True, False])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_slow_grammar_gives_the_same_output(
    name: str, has_threads: bool, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make(number, name, replace(SAMPLING[1], seed=number), proposes=True) for number in range(1, 5)]
    found = rig(Setup(drafts=DRAFTING, commit_lag=lag)).run(*requests)
    assert not any(output.num_drafted for output in found.values())
    monkeypatch.setattr(matcher, "FREE_S", 1e9)
    monkeypatch.setattr(matcher, "APART_S", 1e9)
    for request in requests:
        expected = alone(request)
        assert found[request.key[1]].token_ids == expected.token_ids
        assert found[request.key[1]].finish_reason is expected.finish_reason is FinishReason.EOS


def test_a_thread_takes_in_tokens_that_delay_a_step_though_they_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several requests share a step, so that it waits for all of their tokens."""
    monkeypatch.setattr(matcher, "FREE_S", 1e9)
    monkeypatch.setattr(matcher, "APART_S", -1.0)
    monkeypatch.setattr(matcher, "MAX_MATCHING_S", 0.0)
    take, taken = matcher.GrammarMatcher._take, list[int]()

    def take_apart(self: matcher.GrammarMatcher, token_ids: Sequence[int]) -> bool:
        taken.extend(token_ids)
        return take(self, token_ids)

    monkeypatch.setattr(matcher.GrammarMatcher, "_take", take_apart)
    output = rig(Setup()).run(make(1, next(iter(GRAMMARS)), SAMPLING[1]))[1]
    assert output.finish_reason is FinishReason.EOS
    assert taken == output.token_ids[1:], "but for the first, whose time was measured"


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_that_turns_slow_between_drafts_gives_the_same_output(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of a step takes long, so that a thread takes in those after it: perhaps the last one of the grammar."""
    monkeypatch.setattr(matcher, "FREE_S", 1e6)
    monkeypatch.setattr(matcher, "APART_S", 1e6)
    monkeypatch.setattr(matcher, "MAX_MATCHING_S", 1e9)
    consume = matcher.GrammarMatcher._consume
    for number, num_fast in product(range(1, 3), range(12)):
        request = make(number, name, replace(SAMPLING[1], seed=number), proposes=True)
        expected, left = alone(request), iter(range(num_fast))

        def consume_slowly(self: matcher.GrammarMatcher, token_id: int, left: Iterator[int] = left) -> bool:
            self.is_slow = self.is_slow or next(left, None) is None
            return consume(self, token_id)

        with monkeypatch.context() as patch:
            patch.setattr(matcher.GrammarMatcher, "_consume", consume_slowly)
            output = rig(Setup(drafts=DRAFTING)).run(request)[number]
        assert output.token_ids == expected.token_ids
        assert output.finish_reason is expected.finish_reason is FinishReason.EOS


@pytest.mark.usefixtures("every_token_is_slow")
def test_an_output_of_as_many_tokens_as_it_may_have_ends_with_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(matcher, "FREE_S", 1e9)
        patch.setattr(matcher, "APART_S", 1e9)
        whole = alone(make(1, "regex", SAMPLING[1]))
    for num_tokens in (len(whole.token_ids), len(whole.token_ids) - 1):
        request = make(1, "regex", SAMPLING[1])
        request.max_new_tokens = num_tokens
        output = rig().run(request)[1]
        assert output.token_ids == whole.token_ids[:num_tokens]
        is_whole = num_tokens == len(whole.token_ids)
        assert output.finish_reason is (FinishReason.EOS if is_whole else FinishReason.LENGTH)


@pytest.mark.usefixtures("every_token_is_slow")
def test_no_step_waits_for_a_slow_grammar() -> None:
    compiler = Held()
    here = Rig(Setup(grammars=compiler))
    slow, other = make(1, "object", SAMPLING[0]), make_request(2, [3, 4, 5], 10)
    here.submit(slow, other)
    here.step(8)
    assert slow.num_output == 2 and other.num_output == 8  # the first token showed that it is slow
    here.step(2)
    assert here.outputs[2].finish_reason is FinishReason.LENGTH
    assert not here.outbox.take(EPOCH).status.is_stalled
    num_wakes = here.num_wakes
    assert here.step().status.is_stalled
    assert here.num_wakes == num_wakes + 1, "a router that has a request sends it now"
    while not slow.finish_reason:
        compiler.let()
        here.step(2)
    assert here.outputs[1].token_ids == alone(make(1, "object", SAMPLING[0])).token_ids


def abort(here: Rig, _slow: Request) -> None:
    here.abort(1)


def reach_the_deadline(here: Rig, slow: Request) -> None:
    slow.deadline = here.scheduler._next_deadline = 0.0


def use_the_id_twice(here: Rig, _slow: Request) -> None:
    here.submit(make(1, "object", SAMPLING[0]))


def take_too_long(here: Rig, _slow: Request) -> None:
    assert isinstance(here.engine._intake._grammars, Held)
    for _, running in here.engine._intake._grammars.held:
        running.set_result(False)


def end_the_stream(here: Rig, _slow: Request) -> None:
    here.inbox.put(StreamEnded(EPOCH))


ENDS: dict[FinishReason, list[Callable[[Rig, Request], None]]] = {
    FinishReason.ABORTED: [abort, end_the_stream],
    FinishReason.DEADLINE: [reach_the_deadline],
    FinishReason.ERROR: [use_the_id_twice, take_too_long],
}


@pytest.mark.usefixtures("every_token_is_slow")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("is_preempted", [False, True], ids=("running", "preempted"))
@pytest.mark.parametrize(("reason", "end"), [(reason, end) for reason, ends in ENDS.items() for end in ends])
def test_a_request_that_ends_while_a_thread_takes_in_its_tokens_leaves_nothing(
    reason: FinishReason, end: Callable[[Rig, Request], None], is_preempted: bool, lag: int
) -> None:
    compiler = Held()
    here = Rig(Setup(grammars=compiler, commit_lag=lag))
    slow, other = make(1, "object", SAMPLING[0]), make_request(2, [3, 4, 5], 30)
    here.submit(slow, other)
    here.step(4)
    assert compiler.held and not slow.constraint.is_ready
    if is_preempted:
        assert here.scheduler._take_back(slow)
    end(here, slow)
    here.step(2)
    assert not here.engine._intake._compiling
    for work, running in compiler.held:
        work()
        if not running.done():
            running.set_result(True)
    here.step(2)
    assert slow.finish_reason is reason and not slow.page_ids and slow.row < 0
    assert other.finish_reason is (FinishReason.ABORTED if end is end_the_stream else FinishReason.NONE)
    here.step(40)
    here.assert_clean()


def test_a_request_ends_once_its_grammar_took_too_long() -> None:
    seconds = iter(range(10**6))
    compiler = small_tokenizer.compiler()
    match = compiler.match

    def timed(*arguments: object, **options: object) -> matcher.GrammarMatcher:
        constraint = match(*arguments, **options)  # type: ignore[arg-type]
        constraint._clock = lambda: 0.2 * next(seconds)
        compiler._consumer.processor_time = constraint._clock  # type: ignore[method-assign]
        return constraint

    compiler.match = timed  # type: ignore[method-assign]
    here = Rig(Setup(grammars=compiler))
    slow = make(1, "object", SAMPLING[0])
    slow.grammar = Grammar(regex("[a-f]{50}"))
    output = here.run(slow)[1]
    assert output.finish_reason is FinishReason.ERROR and output.error == TOO_SLOW and not output.retryable
    assert len(output.token_ids) in (5, 6)  # ten times 0.2 s, two for each token


def test_an_ambiguous_grammar_is_found_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processor's time: sooner or later every token takes longer than any limit."""
    monkeypatch.setattr(matcher, "FREE_S", 0.0005)
    monkeypatch.setattr(matcher, "APART_S", 0.0005)
    monkeypatch.setattr(matcher, "MAX_MATCHING_S", 0.02)
    here = rig()
    request = make(1, "object", SamplingParams(do_sample=True, temperature=2.0, seed=3, allowed_ids=(1, 2)))
    request.grammar, request.max_new_tokens = Grammar(AMBIGUOUS), 400
    assert here.run(request)[1].error == TOO_SLOW


def test_callers_share_the_threads_that_compile() -> None:
    compiler = GrammarCompiler(small_tokenizer.tokenizer, lambda: None)
    order: list[str] = []
    blocker: Future[None] = Future()
    threads = compiler._threads
    busy = [threads.submit(blocker.result, None) for _ in range(2)]
    jobs = [threads.submit(partial(order.append, "flood"), None, "flood") for _ in range(50)]
    jobs.append(threads.submit(partial(order.append, "canary"), None, "canary"))
    blocker.set_result(None)
    for job in [*busy, *jobs]:
        job.result(30)
    assert order.index("canary") < 6


@pytest.mark.parametrize(("limit", "most"), [("MAX_COMPILED", 3), ("MAX_COMPILED_BYTES", 3 * len(regex("a{10}")))])
def test_the_newest_compiled_grammars_are_kept(limit: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, limit, most)
    compiler = small_tokenizer.compiler()
    texts = [regex(f"a{{{number}}}") for number in range(10, 20)]
    for text in [*texts, texts[-3]]:
        assert compiler.match(Grammar(text)).start()
    kept = [compiler_module._key(text) for text in (texts[-2], texts[-1], texts[-3])]
    assert list(compiler._compiled) == kept
