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

LINKS = (
    " = ",
    ": ",
    " is ",
    " -> ",
    " := ",
    "=",
    " has ",
    " => ",
    " was ",
    " - ",
    " | ",
    " holds ",
    " == ",
    " ~ ",
    " equals ",
    ":",
    " becomes ",
    "; ",
    " <- ",
    " / ",
    " means ",
    " contains ",
    ", ",
    " : ",
    " * ",
    " with ",
    " + ",
    " reads ",
    " >> ",
    " says ",
    " > ",
    " is set to ",
    " :: ",
    " as ",
    " # ",
    " for ",
    " & ",
    " shows ",
    " % ",
    " <= ",
    " gives ",
    " at ",
    " ... ",
    " ! ",
    " has the value ",
    " to ",
    " @ ",
    " -- ",
    " will be ",
    " >= ",
    " stands for ",
    " ^ ",
    " field ",
    " ? ",
    " --> ",
)
"""Between a field and its value."""
QUOTES = ('"', "'")
"""Around a value that is no number."""
OPENINGS = (
    "",
    "Record:\n",
    "Data:\n",
    "We know this:\n",
    "Input:\n",
    "# Record\n",
    "Entry:\n",
    "Here is a record.\n",
    "Given:\n",
    "Fields:\n",
    "From the form:\n",
    "New entry.\n",
    "Row:\n",
    "Values:\n",
    "The record says:\n",
    "[record]\n",
    "A card with these lines:\n",
    "Settings\n",
    "Look at this:\n",
    "Details:\n",
    "-----\n",
    "These are the facts.\n",
    "Object\n",
    "1 record\n",
    "Properties:\n",
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
    "Fields as JSON:",
    "JSON object:",
    "Turn this into JSON.",
    "json",
    "Answer in JSON:",
    "Please write JSON.",
    "Now as JSON:",
    "-> JSON",
    "What is that in JSON?",
    "Encode it as JSON:",
    "Print JSON.",
    "As a JSON object:",
)


def examples(half: Half, choice: random.Random) -> list[Example]:
    """They have nothing in common but the first token."""
    return [_example(half, choice) for _ in range(EXAMPLES_AT_ONCE)]


def _example(half: Half, choice: random.Random) -> Example:
    links, openings, requests = _pools(half)
    link, opening, request = choice.choice(links), choice.choice(openings), choice.choice(requests)
    num_fields, quote, parts = choice.choice(NUM_FIELDS), choice.choice(QUOTES), {link, opening, request}
    record: dict[str, str | int] = {}
    while len(record) < num_fields:
        key, (value, words) = field(half, choice), _value(half, choice)
        if not parts & {key, *words}:  # nothing stands in a record twice
            record[key] = value
            parts |= {key, *words}
    lines = [f"{key}{link}{_written(value, quote)}\n" for key, value in record.items()]
    prompt = opening + "".join(lines) + f"\n{request}\n"
    return Example(prompt, json.dumps(record), frozenset(parts - {""}))


@cache
def _pools(half: Half) -> tuple[tuple[str, ...], ...]:
    return of_half(LINKS, half), of_half(OPENINGS, half), of_half(REQUESTS, half)


def _written(value: str | int, quote: str) -> str:
    return f"{quote}{value}{quote}" if isinstance(value, str) else str(value)


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
