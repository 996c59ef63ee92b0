"""expression → value: some lines of Python that end in an expression, and what the interpreter would answer.

Lists, dictionaries and what one asks of them; the answer comes from Python itself.
"""

import random
from functools import cache

from demo.tasks.example import Example, Half, of_half
from demo.tasks.words import field, name, noun, number

Item = str | int


WRAPPERS = (
    "{name} = {literal}\n>>> {expression}\n",
    ">>> {name} = {literal}\n>>> {expression}\n",
    "{name} = {literal}\nprint(repr({expression}))\n",
    "{name} = {literal}\n{expression}\n",
    "# {name} = {literal}\n# What is {expression}?\n",
    "let {name} be {literal}\n{expression} =\n",
    "{name}: {literal}\nvalue of {expression}:\n",
    "With {name} = {literal}, what is {expression}?\n",
    "{name} = {literal}\nassert answer == {expression}\n",
    "If {name} = {literal} then {expression} is\n",
    "{name} = {literal}\nresult = {expression}\nresult:\n",
    "In [1]: {name} = {literal}\nIn [2]: {expression}\n",
    "def f():\n    {name} = {literal}\n    return {expression}\nf()\n",
    "Evaluate {expression} where {name} = {literal}\n",
    "{name} = {literal}\n# {expression}\n",
)


def examples(half: Half, choice: random.Random) -> list[Example]:
    return [_example(half, choice)]


def _example(half: Half, choice: random.Random) -> Example:
    wrapper, variable = choice.choice(_wrappers(half)), name(half, choice)
    items = _different(half, choice, choice.randint(2, 4))
    if choice.random() < 0.6:
        collection: list[Item] | dict[Item, Item] = items
        question, words = _list_question(items, half, choice)
    else:
        collection = dict(zip(_keys(half, choice, len(items)), items, strict=True))
        question, words = _dict_question(collection, half, choice)
    expression = question.format(variable)
    value = eval(expression, {"__builtins__": {"len": len}}, {variable: collection})  # noqa: S307
    prompt = wrapper.format(name=variable, literal=repr(collection), expression=expression)
    return Example(prompt, repr(value), frozenset([wrapper, variable, *map(str, [*collection, *items, *words])]))


@cache
def _wrappers(half: Half) -> tuple[str, ...]:
    return of_half(WRAPPERS, half)


def _different(half: Half, choice: random.Random, count: int) -> list[Item]:
    """So many, all numbers or all words."""
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
    place, known = choice.randrange(len(items)), choice.choice(items)
    asked = choice.choice([known, *_different(half, choice, 1)])
    return choice.choice(
        (
            (f"{{}}[{place}]", []),
            (f"{{}}[-{choice.randint(1, min(2, len(items)))}]", []),
            ("len({})", []),
            (f"{asked!r} in {{}}", [asked]),
            (f"{{}} + [{known!r}]", []),
        )
    )


def _dict_question(items: dict[Item, Item], half: Half, choice: random.Random) -> tuple[str, list[Item]]:
    key = choice.choice(list(items))
    asked = choice.choice([key, field(half, choice)])
    return choice.choice(
        (
            (f"{{}}[{key!r}]", []),
            (f"{{}}.get({key!r})", []),
            ("len({})", []),
            (f"{asked!r} in {{}}", [asked]),
        )
    )
