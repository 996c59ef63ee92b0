"""What a task is: an endless, seeded supply of prompts with their one right answer, in two halves that share nothing.

Every name, value, noun and template belongs to one half, whatever the seed, so the halves are disjoint however much is
drawn from them. Knows no task and no model.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Protocol

HELD_OUT_PERCENT = 20


class Half(Enum):
    TRAINING = "training"
    HELD_OUT = "held out"


@dataclass(frozen=True)
class Example:
    """One question and its answer."""

    prompt: str
    """As a user sends it: BOS is the tokenizer's business. It ends with a line's end, so that the answer starts one."""
    answer: str
    """All that the model is to write before EOS."""
    parts: frozenset[str]
    """Everything that was put in: names, values, nouns, templates. No part belongs to both halves."""

    def matches(self, text: str) -> bool:
        return text == self.answer


class Task(Protocol):
    """A module of this package."""

    def examples(self, half: Half, choice: random.Random) -> list[Example]:
        """Examples that start alike, in order that training reads their common start once. At least one."""
        ...


def half_of(part: str) -> Half:
    digest = hashlib.sha256(part.encode()).digest()
    return Half.HELD_OUT if int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT else Half.TRAINING


def of_half(pool: Sequence[str], half: Half) -> tuple[str, ...]:
    """One in five of a list of templates is held out."""
    return tuple(part for index, part in enumerate(pool) if (index % 5 == 4) is (half is Half.HELD_OUT))


def composed(half: Half, *columns: Sequence[str]) -> tuple[str, ...]:
    """Templates made of one piece of each column. The whole template decides its half: both halves know all pieces."""
    return tuple(text for pieces in product(*columns) if half_of(text := "".join(pieces)) is half)


def training_examples(task: Task, seed: int, step: int) -> list[Example]:
    return task.examples(Half.TRAINING, random.Random(f"training {seed} {step}"))


def held_out_examples(task: Task, count: int) -> list[Example]:
    """The same ones always."""
    choice = random.Random("held out")
    found: list[Example] = []
    while len(found) < count:
        found.append(task.examples(Half.HELD_OUT, choice)[0])
    return found
