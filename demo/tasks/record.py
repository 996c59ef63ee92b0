"""record → JSON: some fields with their values, written in one of many ways, as one JSON object.

Numbers stay numbers, everything else becomes a string, and the order of the fields is kept.
"""

import json
import random
from functools import cache

from demo.tasks.example import Example, Half, of_half
from demo.tasks.words import field, name, noun, number, proper_name

NUM_FIELDS = (3, 4, 5)
EXAMPLES_AT_ONCE = 4

PAIRS = (
    "{}: {}",
    "{} = {}",
    "{}={}",
    "{} is {}",
    "the {} is {}",
    "{} -> {}",
    "{} ({})",
    "<{}> {}",
    "[{}] {}",
    "{} => {}",
    "- {}: {}",
    "{} := {}",
    "{} | {}",
    "its {} is {}",
    "({}) {}",
    "* {} = {}",
    "{} -- {}",
    "{} equals {}",
    "{}:{}",
    "{{{}}} {}",
    "{} was {}",
    "{}... {}",
    "/{}/ {}",
    "{} [{}]",
    "--{} {}",
    "'{}' {}",
    "{} ~ {}",
    "{} > {}",
    "our {}: {}",
    "{} <- {}",
)
SEPARATORS = ("; ", ", ", "\n", " / ", "\n\n", " and ", " & ", ". ", ",\n", " // ", ";\n", " + ", " || ", " * ", " ;; ")
OPENINGS = (
    "",
    "Record:\n",
    "Data: ",
    "We know this:\n",
    "Input:\n",
    "# Record\n",
    "Entry: ",
    "Here is a record.\n",
    "Given:\n",
    "Fields:\n",
    "From the form: ",
    "New entry.\n",
    "Row: ",
    "Values:\n",
    "The record says:\n",
)
REQUESTS = (
    "JSON:",
    "As JSON:",
    "Write it as JSON.",
    "Convert to JSON:",
    "The same in JSON:",
    "Output:\nJSON",
    "to JSON",
    "Give me JSON.",
    "Return a JSON object.",
    "In JSON this is:",
    "# JSON",
    "Make it JSON, please.",
    "Format: JSON",
    "{} fields as JSON:",
    "JSON object:",
)


def examples(half: Half, choice: random.Random) -> list[Example]:
    """They have nothing in common but the first token."""
    return [_example(half, choice) for _ in range(EXAMPLES_AT_ONCE)]


def _example(half: Half, choice: random.Random) -> Example:
    pairs, separators, openings, requests = _pools(half)
    pair, separator = choice.choice(pairs), choice.choice(separators)
    opening, request = choice.choice(openings), choice.choice(requests)
    num_fields, parts = choice.choice(NUM_FIELDS), {pair, separator, opening, request}
    record: dict[str, str | int] = {}
    while len(record) < num_fields:
        key = field(half, choice)
        if key not in record:
            record[key], words = _value(half, choice)
            parts |= {key, *words}
    text = separator.join(pair.format(key, value) for key, value in record.items())
    prompt = f"{opening}{text}\n{request.format(num_fields)}\n"
    return Example(prompt, json.dumps(record), frozenset(parts - {""}))


@cache
def _pools(half: Half) -> tuple[tuple[str, ...], ...]:
    return of_half(PAIRS, half), of_half(SEPARATORS, half), of_half(OPENINGS, half), of_half(REQUESTS, half)


def _value(half: Half, choice: random.Random) -> tuple[str | int, list[str]]:
    """A value, and what it was made of."""
    kind = choice.random()
    if kind < 0.3:
        value = number(half, choice)
        return value, [str(value)]
    if kind < 0.45:
        words = [noun(half, choice)]
    elif kind < 0.55:
        words = [name(half, choice)]
    else:
        words = [proper_name(half, choice) for _ in range(choice.choice((1, 1, 2)))]
    return " ".join(words), words
