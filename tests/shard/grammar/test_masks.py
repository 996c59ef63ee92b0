"""Masks of rows after drafts equal those that are filled token by token, and disallowed logits become -inf."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from lorikeet.proto.grammars import GRAMMAR_LIMITS, read_grammar_tokenizer
from lorikeet.proto.params import Grammar
from lorikeet.shard.grammar import matcher
from lorikeet.shard.grammar.masks import GrammarMasks
from lorikeet.shard.requests.request import ScheduledRequest
from tests.oracles.random_schemas import CONSTRUCTS, constructs_of, schemas
from tests.shard.grammar import small_tokenizer
from tests.shard.rig import make_request

DEMO = Path(__file__).parents[3] / "demo" / "base"
VOCAB = 4096
SEED = 22


@cache
def tokenizer() -> LLTokenizer:
    return read_grammar_tokenizer(DEMO, VOCAB)


def allowed(matcher: LLMatcher) -> np.ndarray:
    """[V] bool."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, count=VOCAB, bitorder="little").astype(bool)


def walks(num_schemas: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Grammars, tokens that follow them, and tokens that may follow next: a random walk and its continuation."""
    rng = random.Random(SEED)
    for schema in schemas(num_schemas, SEED):
        grammar = small_tokenizer.schema(schema)
        matcher = LLMatcher(tokenizer(), grammar, log_level=0, limits=GRAMMAR_LIMITS)
        if matcher.get_error():
            continue
        walk: list[int] = []
        while len(walk) < 60 and not matcher.is_stopped():
            walk.append(int(rng.choice(np.flatnonzero(allowed(matcher)).tolist())))
            matcher.consume_token(walk[-1])
        cut = rng.randrange(len(walk))
        yield grammar, walk[:cut], walk[cut:]


def assert_rows_equal(num_schemas: int, least_rows: int) -> None:
    masks = GrammarMasks(VOCAB)
    compiler = small_tokenizer.Immediate(tokenizer, lambda: None)
    num_rows = 0
    for grammar, known, rest in walks(num_schemas):
        drafts = rest[:8] + [5]  # the last may be refused; no row follows it
        request = make_request(1, [1, *known], 100, grammar=Grammar(grammar))
        request.num_prompt = 1
        request.constraint = compiler.match(request.grammar, known)
        assert request.constraint.start() and not request.constraint.error
        drafts = drafts[: request.constraint.num_allowed(drafts)]
        masks.start([ScheduledRequest(request, 0, len(request.token_ids), True, drafts)])
        logits = torch.zeros(1 + len(drafts), VOCAB)
        masks.apply(logits)
        single = LLMatcher(tokenizer(), grammar, log_level=0, limits=GRAMMAR_LIMITS)
        single.consume_tokens(known)
        for row, draft_id in enumerate([*drafts, -1]):
            if not single.is_stopped():
                assert torch.equal(logits[row] == 0, torch.from_numpy(allowed(single)))
                num_rows += 1
            if draft_id >= 0:
                single.consume_token(draft_id)
    assert num_rows >= least_rows


def test_rows_after_drafts_equal_rows_filled_one_by_one() -> None:
    assert_rows_equal(60, 200)


@pytest.mark.long
def test_ten_thousand_rows_after_drafts_equal_rows_filled_one_by_one() -> None:
    assert_rows_equal(2500, 10_000)


def test_stop_tokens_may_end_a_text_where_the_end_token_may() -> None:
    masks = GrammarMasks(small_tokenizer.VOCAB_SIZE)
    request = make_request(1, [1, 2], 100, grammar=Grammar(small_tokenizer.regex("a+")), stop_ids=frozenset({0, 55}))
    request.constraint = small_tokenizer.compiler().match(request.grammar)
    a = small_tokenizer.LETTERS.index("a") + 1
    for known, expected in (([], {a}), ([a], {0, 55, a})):
        request.constraint = small_tokenizer.compiler().match(request.grammar, known)
        assert request.constraint.start()
        masks.start([ScheduledRequest(request, 0, 2, True)])
        logits = torch.zeros(1, small_tokenizer.VOCAB_SIZE)
        masks.apply(logits)
        assert {int(each) for each in (logits[0] == 0).nonzero()[:, 0]} == expected


def test_other_rows_are_unchanged() -> None:
    masks = GrammarMasks(small_tokenizer.VOCAB_SIZE)
    plain, constrained = (
        make_request(1, [1, 2], 9),
        make_request(2, [1, 2], 9, grammar=Grammar(small_tokenizer.regex("a"))),
    )
    constrained.constraint = small_tokenizer.compiler().match(constrained.grammar)
    constrained.constraint.start()
    masks.start([ScheduledRequest(plain, 0, 2, True, [3, 4]), ScheduledRequest(constrained, 0, 2, True)])
    logits = torch.zeros(4, small_tokenizer.VOCAB_SIZE)
    masks.apply(logits)
    assert torch.equal(logits[:3], torch.zeros(3, small_tokenizer.VOCAB_SIZE))
    assert int((logits[3] == 0).sum()) == 1


def test_random_schemas_show_every_construct_often_enough() -> None:
    found = [constructs_of(schema) for schema in schemas(500, SEED)]
    for construct in CONSTRUCTS:
        assert sum(construct in each for each in found) >= 50, construct
    assert schemas(5, SEED) == schemas(5, SEED) != schemas(5, SEED + 1)


@pytest.mark.parametrize("vocab_size", [32, small_tokenizer.VOCAB_SIZE, small_tokenizer.VOCAB_SIZE + 64])
def test_the_mask_of_a_slow_grammar_fits_models_of_other_vocabularies(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may have more tokens than the model, or fewer."""
    monkeypatch.setattr(matcher, "APART_S", -1.0)
    a = small_tokenizer.LETTERS.index("a") + 1
    request = make_request(1, [1, 2], 9, grammar=Grammar(small_tokenizer.regex("aa+")))
    constraint = request.constraint = small_tokenizer.compiler().match(request.grammar)
    assert constraint.start()
    constraint.commit(a)
    constraint.commit(a)
    assert not constraint.is_ready and constraint.start() and isinstance(constraint, matcher.GrammarMatcher)
    assert constraint.has_mask and not constraint.error
    masks = GrammarMasks(vocab_size)
    masks.start([ScheduledRequest(request, 0, 2, True)])
    logits = torch.zeros(1, vocab_size)
    masks.apply(logits)
    assert not constraint.error
    assert {int(each) for each in (logits[0] == 0).nonzero()[:, 0] if each < small_tokenizer.VOCAB_SIZE} >= {a}
