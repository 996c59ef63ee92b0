"""answer → question: a conversation whose last answer is rewritten as the question that it answers."""

import random

from lorikeet.demo.data.tasks.example import Example, Half
from lorikeet.demo.data.tasks.facts import facts, invocation

INVOCATION = invocation("question")


def examples(half: Half, choice: random.Random) -> list[Example]:
    context = facts(half, choice)
    fact = context.asked
    prompt = context.prompt(fact.sentence, INVOCATION)
    return [Example(prompt, f"Who{fact.verb}{fact.rest}?", context.parts)]
