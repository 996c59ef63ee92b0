"""answer → "yes" or "no": whether the last answer of a conversation stands in its text.

A wrong answer tells something that the text does not say of anybody, half of them of a person that it does not mention.
"""

import random

from lorikeet.demo.data.tasks.example import Example, Half
from lorikeet.demo.data.tasks.facts import VERBS, Facts, facts, invocation, some_rest
from lorikeet.demo.data.tasks.words import proper_name

INVOCATION = invocation("grounded")


def examples(half: Half, choice: random.Random) -> list[Example]:
    found = facts(half, choice)
    if choice.random() < 0.5:
        return [Example(found.prompt(found.asked.sentence, INVOCATION), "yes", found.parts)]
    answer, parts = _wrong_answer(found, half, choice)
    return [Example(found.prompt(answer, INVOCATION), "no", found.parts | parts)]


def _wrong_answer(found: Facts, half: Half, choice: random.Random) -> tuple[str, set[str]]:
    """A sentence that is not in the text, and what is new in it."""
    person, verbs = found.asked.person, {fact.verb.strip() for fact in found.all}
    rest, parts = some_rest(half, choice)
    if choice.random() < 0.5:
        while person in {fact.person for fact in found.all}:
            person = proper_name(half, choice)
        parts.add(person)
    return f"{person} {choice.choice([verb for verb in VERBS if verb not in verbs])}{rest}.", parts
