"""answer → "yes" or "no": whether the last answer of a conversation stands in its text.

A wrong answer tells something that the text does not say of anybody, half of them of a person that it does not mention.
"""

import random

from lorikeet.demo.data.tasks.example import Example, Half
from lorikeet.demo.data.tasks.facts import VERBS, PassageFacts, facts, invocation, some_rest
from lorikeet.demo.data.tasks.words import proper_name

INVOCATION = invocation("grounded")


def examples(half: Half, choice: random.Random) -> list[Example]:
    context = facts(half, choice)
    if choice.random() < 0.5:
        return [Example(context.prompt(context.asked.sentence, INVOCATION), "yes", context.parts)]
    answer, parts = _wrong_answer(context, half, choice)
    return [Example(context.prompt(answer, INVOCATION), "no", context.parts | parts)]


def _wrong_answer(context: PassageFacts, half: Half, choice: random.Random) -> tuple[str, set[str]]:
    """A sentence that is not in the text, and what is new in it."""
    person, verbs = context.asked.person, {fact.verb.strip() for fact in context.all}
    rest, parts = some_rest(half, choice)
    if choice.random() < 0.5:
        while person in {fact.person for fact in context.all}:
            person = proper_name(half, choice)
        parts.add(person)
    return f"{person} {choice.choice([verb for verb in VERBS if verb not in verbs])}{rest}.", parts
