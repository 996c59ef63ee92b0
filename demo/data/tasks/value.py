"""expression → value: lines of Python that end in an expression, and its value.

Expressions on lists and dictionaries; Python itself computes the answer.
"""

import random
from functools import cache

from lorikeet.demo.data.tasks.example import Example, Half, composed
from lorikeet.demo.data.tasks.words import field, name, noun, number

Item = str | int


GIVEN = ("", ">>> ", "# ", "let ", "given ", "In: ")
ASSIGNED = ("{name} = {literal}\n", "{name} is {literal}\n", "{name}: {literal}\n", "{name} := {literal}\n")
ASKED = (
    "{expression}\n",
    ">>> {expression}\n",
    "print(repr({expression}))\n",
    "# {expression}\n",
    "What is {expression}?\n",
    "{expression} =\n",
    "value of {expression}:\n",
    "result = {expression}\nresult:\n",
    "return {expression}\n",
    "Evaluate {expression}\n",
)
"""A prompt is composed of one of each."""


def examples(half: Half, choice: random.Random) -> list[Example]:
    return [_example(half, choice)]


def _example(half: Half, choice: random.Random) -> Example:
    wrapper, variable = choice.choice(_wrappers(half)), name(half, choice)
    items = _different(half, choice, choice.randint(2, 4))
    if choice.random() < 0.5:
        collection: list[Item] | dict[Item, Item] = items
        question, words = _list_question(items, half, choice)
    else:
        collection = dict(zip(_keys(half, choice, len(items)), items, strict=True))
        question, words = _dict_question(collection, half, choice)
    expression = question.format(variable)
    value = eval(expression, {"__builtins__": {}}, {variable: collection})  # noqa: S307
    prompt = wrapper.format(name=variable, literal=repr(collection), expression=expression)
    return Example(prompt, repr(value), frozenset([wrapper, variable, *map(str, [*collection, *items, *words])]))


@cache
def _wrappers(half: Half) -> tuple[str, ...]:
    return composed(half, GIVEN, ASSIGNED, ASKED)


def _different(half: Half, choice: random.Random, count: int) -> list[Item]:
    """`count` items, all numbers or all words."""
    make = choice.choice((lambda: name(half, choice), lambda: noun(half, choice), lambda: number(half, choice)))
    items: list[Item] = []
    while len(items) < count:
        items = list(dict.fromkeys([*items, make()]))
    return items


def _keys(half: Half, choice: random.Random, count: int) -> list[Item]:
    keys: list[Item] = []
    while len(keys) < count:
        keys = list(dict.fromkeys([*keys, field(half, choice)]))
    return keys


def _list_question(items: list[Item], half: Half, choice: random.Random) -> tuple[str, list[Item]]:
    """An expression with {} for the list's name, and the items that it names."""
    added = _different(half, choice, 1)
    return choice.choice((("{}[0]", []), ("{}[-1]", []), (f"{{}} + [{added[0]!r}]", added)))


def _dict_question(items: dict[Item, Item], half: Half, choice: random.Random) -> tuple[str, list[Item]]:
    key, others = choice.choice(list(items)), list[Item]([field(half, choice)])
    return choice.choice(
        ((f"{{}}[{key!r}]", []), (f"{{}}.get({key!r})", []), (f"{{}}.get({others[0]!r}, {key!r})", others))
    )
