"""A model whose next token is a hash of what it reads *through the page table*: any error of a page, a slot, a position
or an order changes the text. As in real KV, a slot's content depends on all tokens before it. The expected output of a
request is computed here without pages.
"""

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

from lorikeet.shard.batch.inputs import StepInputs

VOCAB_SIZE = 61
WRONG_EVERY = 4
"""One of about this many tokens of heads is wrong."""


def extend(state: int, token_id: int) -> int:
    """The content of a token's slot, given that of the slot before it (0 before the first)."""
    return crc32(bytes([token_id]), state) or 1


def next_token(states: Sequence[int]) -> int:
    """The greedy continuation of a text with these slots."""
    return digest(states) % VOCAB_SIZE


def digest(states: Sequence[int]) -> int:
    return crc32(array("L", states).tobytes())


def generate_alone(
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    excluded: Callable[[list[int]], set[int]] = lambda output: set(),
) -> list[int]:
    """The output of a request that is computed alone; `excluded` are the tokens that cannot follow an output."""
    states = states_of(prompt_ids)
    output: list[int] = []
    while len(output) < max_new_tokens:
        token_id = next_token(states)
        if token_id in (masked := excluded(output)):
            logits = logits_after(states)
            logits[list(masked)] = float("-inf")
            token_id = int(logits.argmax())
        output.append(token_id)
        states.append(extend(states[-1], output[-1]))
        if output[-1] in stop_ids:
            break
    return output


def states_of(token_ids: Sequence[int]) -> list[int]:
    """The contents of a text's slots."""
    states = [0]
    for token_id in token_ids:
        states.append(extend(states[-1], token_id))
    return states[1:]


def logits_after(states: Sequence[int]) -> torch.Tensor:
    """[V] scores whose highest is the greedy continuation, different for every text."""
    generator = torch.Generator().manual_seed(digest(states))
    logits = torch.randn(VOCAB_SIZE, generator=generator)
    logits[next_token(states)] = 6.0
    return logits


class FakeModel:
    """A model as the engine sees it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.inputs = StepInputs(page_size, torch.device("cpu"))
        self.slots = [0xBAD] * (num_pages * page_size)
        self.num_steps = 0
        self.num_tokens = 0
        self.poison: int | None = None
        """A token whose slot makes the logits of rows that read it NaN."""
        self.poisoned: set[int] = set()
        self.failures: list[Exception] = []
        """Raised by the next steps, last first, before anything is written."""
        self.most_tokens: int | None = None
        """Steps with more tokens run out of memory."""

    def forward(self) -> torch.Tensor:
        """[S, V] logits."""
        self.num_steps += 1
        if self.failures:
            raise self.failures.pop()
        if self.most_tokens is not None and len(self.inputs.input_ids) > self.most_tokens:
            raise torch.OutOfMemoryError("no memory left")
        inputs = self.inputs
        input_ids, kv_slots = inputs.input_ids.tolist(), inputs.kv_slots.tolist()
        self.num_tokens += len(input_ids)
        assert len(input_ids) == len(kv_slots) == sum(segment.num_tokens for segment in inputs.segments)
        assert len(set(kv_slots)) == len(kv_slots), "two tokens in one slot"
        # [T] slots seen by each token, itself last
        seen = [
            self.slots_of(segment.page_ids, position + 1)
            for segment in inputs.segments
            for position in range(segment.start, segment.kv_len)
        ]
        for token_id, slot, slots in zip(input_ids, kv_slots, seen, strict=True):
            assert slots[-1] == slot
            self.slots[slot] = extend(self.slots[slots[-2]] if len(slots) > 1 else 0, token_id)
            self.poisoned.discard(slot)
            if token_id == self.poison:
                self.poisoned.add(slot)
        logits = torch.empty(inputs.num_logits, VOCAB_SIZE)
        for row, index in enumerate(inputs.logits_rows.tolist()):
            if self.poisoned.isdisjoint(seen[index]):
                logits[row] = logits_after([self.slots[slot] for slot in seen[index]])
            else:
                logits[row] = float("nan")
        at = len(inputs.logits_rows)
        for row, _, num_drafts in inputs.heads.tolist():
            states = [self.slots[slot] for slot in seen[int(inputs.logits_rows[row])]]
            for draft_id in self.heads(states, num_drafts):
                logits[at] = torch.nn.functional.one_hot(torch.tensor(draft_id), VOCAB_SIZE)
                at += 1
        return logits

    def heads(self, states: Sequence[int], num_drafts: int) -> list[int]:
        """Drafts of heads after the token that follows a text: its greedy continuation, sometimes wrong."""
        states = [*states, extend(states[-1], next_token(states))]
        drafts = []
        for _ in range(num_drafts):
            drafts.append(next_token(states))
            states.append(extend(states[-1], drafts[-1]))
        return [draft_id if draft_id % WRONG_EVERY else (draft_id + 1) % VOCAB_SIZE for draft_id in drafts]

    def slots_of(self, page_ids: Sequence[int], num_tokens: int) -> list[int]:
        page_size = self.inputs.page_size
        return [page_ids[p // page_size] * page_size + p % page_size for p in range(num_tokens)]


class FakeDraft(FakeModel):
    """A draft model that mostly agrees with the model: it also reads its text through the page table."""

    def __init__(self, num_pages: int, page_size: int, chance: float) -> None:
        super().__init__(num_pages, page_size)
        self._chance = chance

    def forward(self) -> torch.Tensor:
        """[S, V] logits, in some rows those of another text."""
        logits = super().forward()
        for row in logits:
            if random.Random(row[0].item()).random() >= self._chance:
                row.copy_(row.roll(7))
        return logits


@dataclass(frozen=True)
class DraftModel:
    """Makes the draft model of a fake model."""

    chance: float = 1.0
    """How often its distribution is that of the model."""

    def make(self, num_pages: int, page_size: int) -> FakeDraft:
        return FakeDraft(num_pages, page_size, self.chance)
