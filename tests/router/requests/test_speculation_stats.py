"""Counts of draft tokens are right for any history of steps, however it is divided into messages and truncated."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.proto.params import Method, Speculation
from lorikeet.router.requests.generation import Generation, num_emitted
from lorikeet.router.requests.request import GenerationRequest
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router.text.vocabularies import byte_level

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DRAFTS = tuple(BY_VALUE)


def step(draw: random.Random, backend_ids: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Tokens and sources of one step, and its drafts by method."""
    drafted = draw.randrange(6)
    accepted = draw.randint(0, drafted)
    source = draw.choice(DRAFTS)
    own = pb.SOURCE_TARGET if not drafted else pb.SOURCE_BONUS if accepted == drafted else pb.SOURCE_RESAMPLE
    tokens = [draw.choice(backend_ids) for _ in range(accepted + 1)]
    return tokens, [source] * accepted + [own], [drafted * (source == draft_source) for draft_source in DRAFTS]


def message(steps: list[tuple[list[int], list[int], list[int]]]) -> pb.RequestOutput:
    """Several steps as a shard sends them while its stream is slow."""
    output = pb.RequestOutput()
    for tokens, sources, drafted in steps:
        output.token_ids.extend(tokens)
        output.sources += bytes(sources)
        output.step_ends += bytes(len(tokens) - 1) + b"\1"
        if any(drafted):
            counts = [a + b for a, b in zip(output.num_drafted or [0] * len(DRAFTS), drafted, strict=True)]
            del output.num_drafted[:]
            output.num_drafted.extend(counts)
            output.num_accepted += len(tokens) - 1
    return output


@pytest.mark.parametrize("seed", range(60))
def test_accounts_hold(seed: int) -> None:
    draw = random.Random(seed)
    backend = byte_level()
    tokenizer = Tokenizer(backend, eos_ids=frozenset())
    stop = draw.choice(LETTERS) if seed % 2 else ""
    ids = [backend.encode(letter).ids[0] for letter in LETTERS]
    speculation = Speculation(Method.AUTO, 5)
    request = GenerationRequest([40], 500, stop_strings=(stop,) if stop else (), speculation=speculation)
    generation = Generation(1, request, tokenizer)
    prefill = ([ids[0]], [pb.SOURCE_PREFILL], [0] * len(DRAFTS))
    steps = [prefill, *(step(draw, ids[1:]) for _ in range(draw.randint(1, 30)))]
    cuts = sorted({0, len(steps), *(draw.randint(0, len(steps)) for _ in range(draw.randint(0, 12)))})
    sent: list[tuple[list[int], list[int], list[int]]] = []
    emitted = 0
    for first, last in pairwise(cuts):
        if generation.is_over:
            break
        sent += steps[first:last]
        output = message(steps[first:last])
        kept = generation.feed(output, 1.0)
        emitted += num_emitted(output, kept)
    tokenizer.close()
    flat = [source for _, sources, _ in sent for source in sources]
    num = generation.num_generated
    speculation_stats = generation.speculation_stats
    assert speculation_stats is not None
    # The text is a prefix of what was sent, truncated only after a stop string.
    assert num == len(flat) or (stop and generation.is_over)
    assert dict(speculation_stats.sources) == {source: flat[:num].count(source) for source in set(flat[:num])}
    assert sum(speculation_stats.sources.values()) == num
    assert speculation_stats.num_accepted == emitted == sum(source in DRAFTS for source in flat[:num])
    assert (
        speculation_stats.num_drafted == sum(sum(drafted) for _, _, drafted in sent) >= speculation_stats.num_accepted
    )
    assert sum(number * count for number, count in speculation_stats.steps.items()) == emitted
    expected = Counter[int]()
    left = num
    for tokens, sources, drafted in sent:
        kept = sources[: max(left, 0)]
        if any(drafted) and kept:
            expected[sum(source in DRAFTS for source in kept)] += 1
        left -= len(tokens)
    assert speculation_stats.steps == expected
    # Forwards that gave tokens: emitted less skipped.
    begun = 0
    for tokens, _, _ in sent:
        num -= len(tokens)
        begun += 1
        if num <= 0:
            break
    assert generation.num_generated - generation.num_skipped == begun
