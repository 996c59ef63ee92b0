"""One generation with scripted outputs: text, stop strings, ends, and slow readers."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import LogprobParams, Method, SamplingParams, Speculation
from lorikeet.router.errors import DeadlineExceeded, GenerationFailed
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import ColumnRows, FinishReason, GenerationRequest, OutputChunk
from lorikeet.router.text.stop import ReasoningSyntax, Start
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router.text.vocabularies import byte_level

EOS = 1


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = Tokenizer(byte_level(), eos_ids=frozenset({EOS}))
    yield made
    made.close()


class Fed:
    """A generation, its chunks for a reader that is always late, and the calls to `on_cancel`."""

    def __init__(self, tokenizer: Tokenizer, **fields: Any) -> None:
        self.cancelled: list[Generation] = []
        request = GenerationRequest(**{"prompt_ids": [40, 41], "max_new_tokens": 100, **fields})
        self.generation = Generation(1, request, tokenizer, on_cancel=self.cancelled.append)
        self.backend = tokenizer.vocabulary.backend

    def ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def feed(self, ids: list[int], **fields: Any) -> int:
        fields.setdefault("logprobs", [-0.5] * len(ids))
        return self.generation.feed(pb.RequestOutput(token_ids=ids, **fields), now=5.0)

    def chunk(self) -> OutputChunk:
        return asyncio.run(self.generation.next())


def test_tokens_have_the_fields_of_their_step(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer, logprobs=LogprobParams(alternatives=2))
    ids = fed.ids(" the fox jumps")
    sources = bytes(range(len(ids)))
    step_ends = bytes([0, 1] * (len(ids) // 2) + [1] * (len(ids) % 2))
    alternatives = [token_id for index in ids for token_id in (index, index + 1)]
    fed.feed(
        ids,
        sources=sources,
        step_ends=step_ends,
        alternative_ids=alternatives,
        alternative_logprobs=[-1.0, -2.0] * len(ids),
        num_cached_tokens=7,
    )
    chunk = fed.chunk()
    assert chunk.text == "".join(token.text for token in chunk.tokens) == " the fox jumps"
    assert [token.id for token in chunk.tokens] == ids == fed.generation.emitted_ids
    assert [token.source for token in chunk.tokens] == list(sources)
    assert [token.skipped for token in chunk.tokens] == [index % 2 == 1 for index in range(len(ids))]
    assert fed.generation.num_skipped == len(ids) // 2
    assert [*(chunk.tokens[0].alternatives or ())] == [
        (ids[0], tokenizer.token_text(ids[0]), -1.0),
        (ids[0] + 1, tokenizer.token_text(ids[0] + 1), -2.0),
    ]
    assert chunk.num_cached == 7
    assert chunk.finish_reason is None


def test_a_late_reader_finds_everything_in_one_chunk(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer)
    first, second = fed.ids("the lazy"), fed.ids(" dog")
    fed.feed(first)
    fed.feed(second, finish_reason=pb.FINISH_LENGTH)
    chunk = fed.chunk()
    assert [token.id for token in chunk.tokens] == first + second
    assert (chunk.text, chunk.finish_reason) == ("the lazy dog", FinishReason.LENGTH)
    with pytest.raises(StopAsyncIteration):
        fed.chunk()


def test_special_tokens_are_reported_but_not_in_the_text(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer)
    fed.feed([*fed.ids("fox"), 2, EOS], finish_reason=pb.FINISH_EOS)
    chunk = fed.chunk()
    assert [(token.text, token.special) for token in chunk.tokens[-2:]] == [("<|turn|>", True), ("</s>", True)]
    assert (chunk.text, chunk.finish_reason) == ("fox", FinishReason.EOS_TOKEN)
    assert fed.generation.num_generated == len(chunk.tokens)


def test_an_end_of_text_that_is_an_ordinary_token_is_not_shown_unless_ignored() -> None:
    fox = byte_level().encode("fox").ids
    own = Tokenizer(byte_level(), eos_ids=frozenset({fox[-1]}))
    for ignore_eos, text in ((False, tokenizer_text(own, fox[:-1])), (True, "fox")):
        fed = Fed(own, ignore_eos=ignore_eos)
        fed.feed(fox, finish_reason=pb.FINISH_EOS)
        assert fed.chunk().text == text
    own.close()


def tokenizer_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.vocabulary.backend.decode(ids)


def test_an_incomplete_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer)
    ids = fed.ids("🦊")
    assert len(ids) > 1
    fed.feed(ids[:1])
    assert [token.text for token in fed.chunk().tokens] == [""]
    fed.feed(ids[:1], finish_reason=pb.FINISH_LENGTH)
    chunk = fed.chunk()
    assert chunk.text == chunk.tokens[-1].text == "\ufffd\ufffd"


@pytest.mark.parametrize("include_stop", [True, False])
@pytest.mark.parametrize("per_message", [1, 2, 100])
def test_a_stop_string_ends_the_request_at_its_token(
    tokenizer: Tokenizer, include_stop: bool, per_message: int
) -> None:
    fed = Fed(tokenizer, stop_strings=("fox jumps",), include_stop=include_stop)
    ids = fed.ids("the quick brown fox jumps over the lazy dog")
    chunks = []
    for start in range(0, len(ids), per_message):
        fed.feed(ids[start : start + per_message])
        chunks.append(fed.chunk())
        if fed.generation.is_over:
            break
    text = "".join(chunk.text for chunk in chunks)
    assert text == ("the quick brown fox jumps" if include_stop else "the quick brown ")
    read = [token for chunk in chunks for token in chunk.tokens]
    assert "".join(token.text for token in read) == "the quick brown fox jumps"
    assert len(read) == fed.generation.num_generated == len(fed.generation.emitted_ids) < len(ids)
    assert chunks[-1].finish_reason is FinishReason.STOP_SEQUENCE
    if not include_stop:
        assert not any(chunk.text.endswith("f") for chunk in chunks)


def test_a_stop_inside_one_token_cuts_the_token(tokenizer: Tokenizer) -> None:
    word = next(
        text for token_id in range(3, 400) if len(text := tokenizer.token_text(token_id)) >= 4 and text.isascii()
    )
    fed = Fed(tokenizer, stop_strings=(word[1:3],))
    fed.feed(fed.ids(word))
    chunk = fed.chunk()
    assert chunk.finish_reason is FinishReason.STOP_SEQUENCE
    assert chunk.text == "".join(token.text for token in chunk.tokens) == word[:3]


@pytest.mark.parametrize(("include_stop", "reason"), [(True, FinishReason.LENGTH), (False, FinishReason.STOP_SEQUENCE)])
def test_length_and_stop_at_the_same_token(tokenizer: Tokenizer, include_stop: bool, reason: FinishReason) -> None:
    fed = Fed(tokenizer, stop_strings=("fox",), include_stop=include_stop)
    fed.feed(fed.ids("the fox"), finish_reason=pb.FINISH_LENGTH)
    chunk = fed.chunk()
    assert chunk.finish_reason is reason
    assert chunk.text == ("the fox" if include_stop else "the ")


def test_held_back_text_comes_with_the_end_even_without_tokens(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer, stop_strings=("fox!",), include_stop=False)
    fed.feed(fed.ids("the fox"))
    assert fed.chunk().text == "the "
    fed.feed([], finish_reason=pb.FINISH_LENGTH)
    assert fed.chunk() == OutputChunk([], "fox", FinishReason.LENGTH)


@pytest.mark.parametrize("per_message", [1, 3, 100])
def test_a_stop_string_counts_from_the_minimum_on(tokenizer: Tokenizer, per_message: int) -> None:
    text = "the fox jumps over the fox and the fox again"
    probe = Fed(tokenizer)
    ids = probe.ids(text)
    num_first = len(probe.ids("the fox"))
    for min_tokens, expected in ((0, "the fox"), (num_first - 1, "the fox"), (num_first, "the fox jumps over the fox")):
        fed = Fed(tokenizer, stop_strings=("fox",), sampling=SamplingParams(min_tokens=min_tokens))
        shown = ""
        for start in range(0, len(ids), per_message):
            fed.feed(ids[start : start + per_message])
            chunk = fed.chunk()
            shown += chunk.text
            if fed.generation.is_over:
                break
        assert shown == expected
        assert (chunk.finish_reason, chunk.stop_reason) == (FinishReason.STOP_SEQUENCE, "fox")


@pytest.mark.parametrize(("include", "text"), [(False, "the fox"), (True, "the fox jumps")])
def test_a_stop_token_ends_the_text(tokenizer: Tokenizer, include: bool, text: str) -> None:
    ids = Fed(tokenizer).ids("the fox")
    last = Fed(tokenizer).ids(" jumps")
    fed = Fed(tokenizer, stop_token_ids=(last[-1],), include_stop_token=include)
    fed.feed([*ids, *last], finish_reason=pb.FINISH_EOS)
    chunk = fed.chunk()
    shown = text if include else "the fox" + "".join(tokenizer.token_text(token_id) for token_id in last[:-1])
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == (shown, FinishReason.STOP_SEQUENCE, last[-1])
    assert [token.hidden for token in chunk.tokens][-1] is not include


def test_an_output_whose_grammar_is_complete_has_no_stop_token(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer, stop_token_ids=(50,))
    fed.feed(fed.ids("fox"), finish_reason=pb.FINISH_EOS)
    chunk = fed.chunk()
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("fox", FinishReason.EOS_TOKEN, None)


def test_a_stop_token_that_was_the_last_of_a_lost_shard_ends_the_text(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer, stop_token_ids=(50,))
    fed.feed([60, 50])
    fed.generation.requeue()
    assert fed.generation.is_over
    assert fed.chunk().stop_reason == 50


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    fox = Fed(tokenizer).ids("fox")
    for fields, text in (
        ({}, "foxfox"),
        ({"skip_special_tokens": False}, "fox<|turn|>fox"),
        ({"skip_special_tokens": False, "include_stop_token": True}, "fox<|turn|>fox</s>"),
        ({"include_stop_token": True}, "foxfox"),
    ):
        fed = Fed(tokenizer, **fields)
        fed.feed([*fox, 2, *fox, EOS], finish_reason=pb.FINISH_EOS)
        chunk = fed.chunk()
        assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == (text, FinishReason.EOS_TOKEN, None)
    fed = Fed(tokenizer, skip_special_tokens=False, stop_strings=("turn|>",))
    fed.feed([*fox, 2, *fox])
    assert fed.chunk().text == "fox<|turn|>"


def test_prompt_log_probabilities_come_with_the_first_chunk(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer, prompt_ids=[40, 41, 42], logprobs=LogprobParams(prefill=True, prefill_alternatives=2))
    first = pb.RequestOutput(
        prefill_logprobs=[-1.0], prefill_alternative_ids=[50, 51], prefill_alternative_logprobs=[-1.0, -2.0]
    )
    assert fed.generation.feed(first, now=1.0) == 0
    fed.feed(
        [60],
        prefill_logprobs=[-3.0],
        prefill_alternative_ids=[52, 53],
        prefill_alternative_logprobs=[-3.0, -4.0],
    )
    chunk = fed.chunk()
    text = tokenizer.token_text
    assert chunk.prefill is not None and chunk.prefill.num_entries == 7
    assert [*chunk.prefill.tokens()] == [(40, text(40), None), (41, text(41), -1.0), (42, text(42), -3.0)]
    assert [[*entries] for entries in chunk.prefill.alternatives()] == [
        [],
        [(50, text(50), -1.0), (51, text(51), -2.0)],
        [(52, text(52), -3.0), (53, text(53), -4.0)],
    ]
    fed.feed([61])
    assert fed.chunk().prefill is None


def test_a_prompt_of_one_token_has_one_without_log_probability(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer, prompt_ids=[40], logprobs=LogprobParams(prefill=True))
    fed.feed([60])
    scores = fed.chunk().prefill
    assert scores is not None
    assert [*scores.tokens()] == [(40, tokenizer.token_text(40), None)]
    assert [len(entries) for entries in scores.alternatives()] == [0]


@pytest.mark.parametrize(
    ("finish", "error", "kind", "message"),
    [
        (pb.FINISH_ERROR, "no pages", GenerationFailed, "no pages"),
        (pb.FINISH_ABORTED, "", GenerationFailed, "ended the request"),
        (pb.FINISH_DEADLINE, "", DeadlineExceeded, "time limit"),
    ],
)
def test_output_is_read_before_the_failure_is_raised(
    tokenizer: Tokenizer, finish: Any, error: str, kind: type[Exception], message: str
) -> None:
    fed = Fed(tokenizer)
    fed.feed(fed.ids("the"), finish_reason=finish, error=error)
    assert fed.chunk().text == "the"
    with pytest.raises(kind, match=message):
        fed.chunk()
    with pytest.raises(StopAsyncIteration):
        fed.chunk()


def test_on_cancel_is_called_once(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer)
    with fed.generation:
        fed.feed(fed.ids("the"))
    fed.generation.cancel()
    assert fed.cancelled == [fed.generation]
    finished = Fed(tokenizer)
    finished.feed([60], finish_reason=pb.FINISH_LENGTH)
    finished.generation.cancel()
    assert finished.cancelled == []


def test_a_step_may_continue_in_the_next_message(tokenizer: Tokenizer) -> None:
    fed = Fed(tokenizer)
    a, b, c = fed.ids("fox")[:1] * 3
    fed.feed([a, b], step_ends=bytes([0, 0]))
    fed.feed([c, a], step_ends=bytes([1, 1]))
    assert [token.skipped for token in fed.chunk().tokens] == [False, True, True, False]
    assert fed.generation.num_skipped == 2


def test_counts_continue_when_a_request_is_retried(tokenizer: Tokenizer) -> None:
    """A shard that was lost in the middle of a step, and another one that takes the request over."""
    speculation = Speculation(Method.AUTO, 4)
    fed = Fed(tokenizer, speculation=speculation)
    ids = fed.ids("the lazy fox jumps over")
    first = {"sources": bytes([0, 2, 2]), "step_ends": bytes([1, 0, 0]), "num_drafted": [3, 0, 0], "num_accepted": 2}
    fed.feed(ids[:3], **first, verify_seconds=0.5)
    fed.generation.requeue()
    fed.generation.routing.place("unix:nowhere", 1, now=6.0)
    second = {"sources": bytes([1, 4, 6]), "step_ends": bytes([1, 0, 1]), "num_drafted": [0, 0, 1], "num_accepted": 1}
    fed.feed(ids[3:6], **second, verify_seconds=0.25)
    speculation_stats = fed.generation.speculation_stats
    assert speculation_stats is not None
    assert [token.skipped for token in fed.chunk().tokens] == [False, False, True, False, False, True]
    assert (speculation_stats.num_drafted, speculation_stats.num_accepted, speculation_stats.verify_seconds) == (
        4,
        3,
        0.75,
    )
    assert sum(speculation_stats.sources.values()) == fed.generation.num_generated == 6


@pytest.mark.parametrize("per_message", [1, 3, 1000])
@pytest.mark.parametrize(
    ("stop", "start", "text", "shown", "is_stopped"),
    [
        ("fox", Start.OPEN, "the fox</think>\n\nthe dog fox jumps", "the fox</think>\n\nthe dog ", True),
        ("\n\n", Start.OPEN, "a\n\nb</think>\n\nthe dog", "a\n\nb</think>\n\nthe dog", False),
        ("think>", Start.OPEN, "a</think>b", "a</think>b", False),
        ("fox", Start.OPEN, "the fox", "the fox", False),
        ("fox", Start.FREE, "<think>fox</think>fo fox", "<think>fox</think>fo ", True),
        ("fox", Start.FREE, "the fox", "the ", True),
        ("<t", Start.FREE, "<think>a</think>b<turn", "<think>a</think>b", True),
        ("fox", Start.CLOSED, "the fox", "the ", True),
    ],
)
def test_a_stop_string_counts_in_the_answer_alone(
    tokenizer: Tokenizer, stop: str, start: Start, text: str, shown: str, is_stopped: bool, per_message: int
) -> None:
    fed = Fed(
        tokenizer, stop_strings=(stop,), include_stop=False, reasoning=ReasoningSyntax("<think>", ("</think>",), start)
    )
    ids = fed.ids(text)
    for at in range(0, len(ids), per_message):
        if not fed.generation.is_over:
            fed.feed(ids[at : at + per_message])
    if not fed.generation.is_over:
        fed.feed([EOS], finish_reason=pb.FINISH_EOS)
    chunk = fed.chunk()
    assert chunk.text == shown
    expected = (FinishReason.STOP_SEQUENCE, stop) if is_stopped else (FinishReason.EOS_TOKEN, None)
    assert (chunk.finish_reason, chunk.stop_reason) == expected


@pytest.mark.parametrize("include_stop", [True, False])
@pytest.mark.parametrize("is_spelled", [True, False])
def test_a_stop_string_matches_a_hidden_token_and_its_letters(
    tokenizer: Tokenizer, is_spelled: bool, include_stop: bool
) -> None:
    """The token's text is not part of the output, and that of the letters is."""
    fed = Fed(tokenizer, stop_strings=("fox<|turn|>",), include_stop=include_stop)
    turn = tokenizer.vocabulary.backend.token_to_id("<|turn|>")
    letters = [token_id for letter in "<|turn|>" for token_id in fed.ids(letter)]
    assert turn not in letters
    fed.feed([turn, *fed.ids("the fo"), turn, *fed.ids(" fox"), *(letters if is_spelled else [turn]), *fed.ids("dog")])
    chunk = fed.chunk()
    end = ("fox<|turn|>" if is_spelled else "fox") if include_stop else ""
    assert (chunk.text, chunk.stop_reason) == ("the fo " + end, "fox<|turn|>")
    assert chunk.tokens[-1].id == (letters[-1] if is_spelled else turn)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=2, max_size=12), st.booleans())
def test_a_token_of_columns_is_as_one_of_an_output(tokenizer: Tokenizer, token_ids: list[int], may_draft: bool) -> None:
    speculation = Speculation(method=Method.LOOKUP, num_tokens=3) if may_draft else Speculation()
    one, other = (Fed(tokenizer, speculation=speculation) for _ in range(2))
    assert not other.generation.feed_token(token_ids[0], -0.5, 1.0), "the first token says more than its text"
    for fed in (one, other):
        fed.feed(token_ids[:1], sources=b"\0", step_ends=b"\1")
    columns = pb.TokenColumns(ids=[7] * 11, token_ids=[*token_ids[1:], *[0] * 11][:11], logprobs=[-0.25] * 11)
    rows = ColumnRows(columns)
    for index, token_id in enumerate(token_ids[1:]):
        assert one.generation.feed(rows.token(index), now=6.0) == 1
        assert other.generation.feed_token(token_id, -0.25, now=6.0)
    made, expected = other.generation, one.generation
    assert (made.emitted_ids, made.last_token_at) == (expected.emitted_ids, expected.last_token_at)
    assert made.charge.num_unread == expected.charge.num_unread
    assert made.speculation_stats == expected.speculation_stats
    assert one.chunk() == other.chunk()


@pytest.mark.parametrize(
    "fields",
    [{"stop_strings": ("x",)}, {"logprobs": LogprobParams(alternatives=2)}],
    ids=["stop string", "alternatives"],
)
def test_a_token_with_more_than_text_is_left_to_feed(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    fed = Fed(tokenizer, **fields)
    fed.feed([40], sources=b"\0", step_ends=b"\1", alternative_ids=[1, 2], alternative_logprobs=[-1.0, -2.0])
    assert not fed.generation.feed_token(41, -0.5, 6.0)
    assert fed.generation.emitted_ids == [40]


@pytest.mark.parametrize("fields", [{"token_ids": [1]}, {"logprobs": [-1.0]}, {"alternative_ids": [1, 2]}])
def test_columns_of_unequal_lengths_are_refused(fields: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match="columns differ in length"):
        ColumnRows(pb.TokenColumns(**{"ids": [7, 8], "token_ids": [1, 2], **fields}))


class Written:
    """A connection that takes some tokens at once."""

    def __init__(self, takes: list[bool]) -> None:
        self._takes = iter(takes)
        self.shown: list[tuple[int, str, float]] = []
        self.given = set[int]()

    def write(self, token_id: int, text: str, logprob: float) -> bool:
        is_taken = next(self._takes)
        self.given.add(token_id)
        if is_taken:
            self.shown.append((token_id, text, logprob))
        return is_taken


@given(takes=st.lists(st.booleans(), min_size=60, max_size=60), pauses=st.lists(st.integers(0, 3), max_size=20))
@settings(max_examples=60, deadline=None)
def test_tokens_that_are_written_and_those_that_are_read_are_all_tokens_in_order(
    tokenizer: Tokenizer, takes: list[bool], pauses: list[int]
) -> None:
    fed = Fed(tokenizer)
    ids = [*fed.ids(" the héllo … fox jumps over the dog ↯ and ends"), 2, *fed.ids(" here")]
    writer, memory = Written(takes), fed.generation.charge

    async def read() -> None:
        while (chunk := await fed.generation.next(writer)).finish_reason is None:
            writer.shown += [(token.id, token.text, token.logprob) for token in chunk.tokens]
        writer.shown += [(token.id, token.text, token.logprob) for token in chunk.tokens]

    async def run() -> None:
        reading = asyncio.ensure_future(read())
        times = iter(pauses)
        for index, token_id in enumerate(ids):
            if not fed.generation.feed_token(token_id, -index / 8, 6.0):
                fed.feed([token_id], logprobs=[-index / 8])
            if num_turns := next(times, 3):  # else the next token came with this one
                fed.generation.wake()
            for _ in range(num_turns):
                await asyncio.sleep(0)
        fed.feed([], finish_reason=pb.FINISH_LENGTH)
        fed.generation.wake()
        await reading

    asyncio.run(run())
    alone = Fed(tokenizer)
    alone.feed(ids, logprobs=[-index / 8 for index in range(len(ids))])
    assert writer.shown == [(token.id, token.text, token.logprob) for token in alone.chunk().tokens]
    assert fed.generation.emitted_ids == ids
    assert memory.num_unread == 0
    assert not writer.given & tokenizer.special_ids, "events of special tokens say so, or have no text"
