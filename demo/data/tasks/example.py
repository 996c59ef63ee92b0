"""The interface of a task: endless seeded prompts, each with one right answer, in two disjoint halves.

Every name, value, noun and template belongs to one half for every seed, so the halves stay disjoint for any number of
examples.
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
    """Without BOS. It ends with a newline or a special token, so that the answer's tokens do not depend on it."""
    answer: str
    """The complete text that the model must generate before EOS."""
    parts: frozenset[str]
    """The names, values, nouns and templates in it. No part belongs to both halves."""

    def matches(self, text: str) -> bool:
        return text == self.answer


class Task(Protocol):
    """A module of this package."""

    def examples(self, half: Half, choice: random.Random) -> list[Example]:
        """At least one example; all have a common start, which training computes once."""
        ...


def half_of(part: str) -> Half:
    digest = hashlib.sha256(part.encode()).digest()
    return Half.HELD_OUT if int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT else Half.TRAINING


def of_half(pool: Sequence[str], half: Half) -> tuple[str, ...]:
    """One in five of a list of templates is held out."""
    return tuple(part for index, part in enumerate(pool) if (index % 5 == 4) is (half is Half.HELD_OUT))


def composed(half: Half, *columns: Sequence[str]) -> tuple[str, ...]:
    """Templates made of one piece per column. The whole template determines its half; both halves use all pieces."""
    return tuple(text for pieces in product(*columns) if half_of(text := "".join(pieces)) is half)


def training_examples(task: Task, seed: int, step: int) -> list[Example]:
    return task.examples(Half.TRAINING, random.Random(f"training {seed} {step}"))


def held_out_examples(task: Task, count: int) -> list[Example]:
    """Held-out examples of a task; every call gives equal ones."""
    choice = random.Random("held out")
    drawn: list[Example] = []
    while len(drawn) < count:
        drawn.append(task.examples(Half.HELD_OUT, choice)[0])
    return drawn
