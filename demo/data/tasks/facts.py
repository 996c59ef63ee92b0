"""Conversations about facts: sentences about several persons, a question, and an answer in a sentence.

The tasks of adapters with invocation tokens (aLoRA) start with them. A system message after the answer invokes the
adapter; the base model alone reads everything before it.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from lorikeet.demo.data.tasks.example import Half, composed
from lorikeet.demo.data.tasks.words import noun, number, proper_name, split

NUM_FACTS = (2, 3)

VERBS = split(
    """found sold repaired counted carried drew hid borrowed kept moved built weighed measured named bought lost showed
    opened shared collected painted followed remembered owns wants needs likes"""
)
OBJECTS = (
    " the {noun}",
    " a {noun}",
    " {number} coins",
    " room {number}",
    " the house of {other}",
    " the {noun} of {other}",
)
PLACES = ("", " in {place}", " near {place}", " for {friend}", " without {friend}", " on day {day}")
QUESTIONS = (
    ("What do you know", "What is written", "Tell me", "What can you say", "Answer", "What does the text say"),
    (" about {person}", " of {person}", ": what did {person} do", " here about {person}", " there about {person}"),
    ("?", ".", ", please."),
)


@dataclass(frozen=True)
class Fact:
    """`Wamiko sold the lantern in Tobar.` in parts."""

    person: str
    verb: str
    """With the space before it."""
    rest: str
    """The object and place, with the space before them."""

    @property
    def sentence(self) -> str:
        return f"{self.person}{self.verb}{self.rest}."


@dataclass(frozen=True)
class PassageFacts:
    """Some facts, and the one that a question is about."""

    all: tuple[Fact, ...]
    asked: Fact
    question: str
    parts: frozenset[str]

    def prompt(self, answer: str, invocation: str) -> str:
        """The conversation as the base's chat template renders it, without BOS."""
        text = " ".join(fact.sentence for fact in self.all)
        return f"<|user|>{text}\n{self.question}<|end|><|assistant|>{answer}<|end|>{invocation}"


def invocation(name: str) -> str:
    """What the base's chat template renders for a system message at the end of a conversation."""
    return f"<|system|>{name}<|end|><|assistant|>"


def facts(half: Half, choice: random.Random) -> PassageFacts:
    persons: list[str] = []
    count = choice.choice(NUM_FACTS)
    while len(persons) < count:
        persons = list(dict.fromkeys([*persons, proper_name(half, choice)]))
    statements, parts = [], set(persons)
    for person in persons:
        rest, used = some_rest(half, choice)
        statements.append(Fact(person, f" {choice.choice(VERBS)}", rest))
        parts |= used
    subject = choice.choice(statements)
    template = choice.choice(_questions(half))
    return PassageFacts(
        tuple(statements), subject, template.format(person=subject.person), frozenset({*parts, template})
    )


def some_rest(half: Half, choice: random.Random) -> tuple[str, set[str]]:
    """An object and a place, and their parts. Both halves have all templates: there are few."""
    template = choice.choice(OBJECTS) + choice.choice(PLACES)
    values: Mapping[str, str] = {
        "noun": noun(half, choice),
        "number": str(number(half, choice)),
        "day": str(number(half, choice)),
        "other": proper_name(half, choice),
        "place": proper_name(half, choice),
        "friend": proper_name(half, choice),
    }
    used = {value for key, value in values.items() if f"{{{key}}}" in template}
    return template.format(**values), used


@cache
def _questions(half: Half) -> tuple[str, ...]:
    return composed(half, *QUESTIONS)
