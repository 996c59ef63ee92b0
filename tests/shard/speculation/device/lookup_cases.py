"""The kernel of drafts on the device against its specification: run by test_lookup.py in a process of its own."""

import os
import random

import pytest
import torch

from lorikeet.shard.requests.request import Source
from lorikeet.shard.speculation.device.device_drafts import (
    BLOCK,
    MOST_DRAFTS,
    NO_TOKEN,
    DeviceDrafts,
    StepDrafts,
    num_device_tokens,
    propose,
)
from lorikeet.shard.speculation.device.lookup_triton import propose as by_kernel

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
MAX_ROWS = 6


class Both:
    """The same rows, drafted by the specification and by the kernel."""

    def __init__(self, texts: dict[int, list[int]], most_tokens: int, ngrams: tuple[int, int]) -> None:
        self.texts = texts
        self.drafts = []
        for device, function in ((torch.device("cpu"), propose), (DEVICE, by_kernel)):
            tokens = torch.zeros(num_device_tokens(MAX_ROWS), dtype=torch.long, device=device)
            drafts = DeviceDrafts(MAX_ROWS, tokens, ngrams, function)
            for row, text in texts.items():
                drafts.add(row, text, most_tokens)
            self.drafts.append(drafts)

    def advance(self, rng: random.Random, vocabulary: int) -> int:
        """A step of random tokens, some of which are drafts that are accepted. Returns their number."""
        step, first, first_head = StepDrafts(), 0, 0
        token_ids: list[int] = []
        bad: list[bool] = []
        for index, row in enumerate(rng.sample(sorted(self.texts), rng.randrange(1, len(self.texts) + 1))):
            width, num_heads = rng.randrange(MOST_DRAFTS + 1), rng.choice((0, 0, 3, MOST_DRAFTS))
            sampled = range(first, first + width + 1)
            source = step.add(index, row, sampled, rng.choice((Source.LOOKUP, Source.MEDUSA)), (first_head, num_heads))
            # a random number of drafts, as far as there are so many, and then other tokens
            ids = self.drafts[0]._draft_ids[source, row, : rng.randrange(width + 1)].tolist()
            ids = ids[: ids.index(NO_TOKEN)] if NO_TOKEN in ids else ids
            token_ids += ids + [rng.randrange(vocabulary) for _ in range(len(sampled) - len(ids))]
            bad += [rng.random() < 0.05 for _ in sampled]
            first, first_head = sampled.stop, first_head + len(sampled) * num_heads
        head_ids = [rng.randrange(vocabulary) for _ in range(first_head)]
        expected = [self._accepted(column, token_ids, bad) for column in step.columns]
        reports = []
        for drafts in self.drafts:
            device = drafts.num_accepted.device
            ids, heads = (torch.tensor(each, dtype=torch.long, device=device) for each in (token_ids, head_ids))
            reports.append(drafts.advance(step, ids, torch.tensor(bad, device=device), heads).cpu())
        assert torch.equal(*reports)
        for (_, row, first, *_), count in zip(step.columns, expected, strict=True):
            assert int(self.drafts[1].num_accepted[row]) == count
            self.texts[row] += token_ids[first : first + count + 1]
        return sum(expected)

    def _accepted(self, column: tuple[int, ...], token_ids: list[int], bad: list[bool]) -> int:
        _, row, first, width, source, *_ = column
        drafted = self.drafts[0]._draft_ids[source, row].tolist()
        for depth in range(width):
            if drafted[depth] != token_ids[first + depth] or bad[first + depth + 1]:
                return depth
        return width

    def assert_equal(self) -> None:
        plain, fused = self.drafts
        assert torch.equal(plain._draft_ids, fused._draft_ids.cpu())
        assert torch.equal(plain._last_tokens, fused._last_tokens.cpu())
        assert torch.equal(plain.num_accepted, fused.num_accepted.cpu())
        for row, text in self.texts.items():
            assert fused._texts[row, : len(text)].tolist() == text
            assert int(fused._lengths[row]) == len(text)


@pytest.mark.parametrize("ngrams", [(1, 8), (2, 3), (3, 3)])
@pytest.mark.parametrize("vocabulary", [2, 5, 30])
def test_drafts_equal_those_of_the_specification(vocabulary: int, ngrams: tuple[int, int]) -> None:
    rng = random.Random(vocabulary * 10 + ngrams[0])
    texts = {row: [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 90))] for row in range(MAX_ROWS)}
    texts[0] = texts[1] + texts[1]
    both, num_found, num_accepted = Both(texts, 800, ngrams), torch.zeros(2), 0
    for _ in range(6):
        num_accepted += both.advance(rng, vocabulary)
        both.assert_equal()
        num_found += (both.drafts[1]._draft_ids != NO_TOKEN).sum(dim=(1, 2)).cpu()
    assert num_found.min() > 0 and num_accepted > 5


def test_texts_longer_than_a_block_are_searched_whole() -> None:
    rng = random.Random(5)
    texts = {row: [rng.randrange(30_000) for _ in range(2 * BLOCK + 10 * row)] for row in range(3)}
    for text in texts.values():
        text[40:47] = text[-7:] = list(range(1, 8))
    both = Both(texts, 4 * BLOCK, (1, 8))
    for row in (0, 2):
        for drafts in both.drafts:
            step = StepDrafts()
            step.add(0, row, range(1), Source.LOOKUP, (0, 0))
            token_ids = torch.tensor([texts[row][47]], device=drafts.num_accepted.device)
            is_bad = torch.zeros(1, dtype=torch.bool, device=token_ids.device)
            report = drafts.advance(step, token_ids, is_bad, None)
            assert report[0].tolist() == [NO_TOKEN] * MOST_DRAFTS + [8]
        texts[row].append(texts[row][47])
        both.assert_equal()
        assert both.drafts[1]._draft_ids[0, row].tolist() == texts[row][48 : 48 + MOST_DRAFTS]
