"""record → JSON: fields with values, written in one of many notations, as one JSON object.

Numbers stay numbers, all other values become strings, and the order of the fields is kept.
"""

import json
import random
from functools import cache

from lorikeet.demo.data.tasks.example import Example, Half, half_of, of_half
from lorikeet.demo.data.tasks.words import field, name, noun, number, proper_name, split

NUM_FIELDS = (3, 4, 5)

SIGNS = (
    "=",
    ":",
    "->",
    ":=",
    "=>",
    "-",
    "|",
    "==",
    "~",
    ";",
    "<-",
    "/",
    ",",
    "*",
    "+",
    ">>",
    ">",
    "::",
    "#",
    "&",
    "%",
    "<=",
    "...",
    "!",
    "@",
    "--",
    ">=",
    "^",
    "?",
    "-->",
    "<",
    "<<",
    "..",
    "===",
    "!!",
    "~~",
    "||",
    "**",
    "//",
    "=:",
)
"""Between a field and its value, in one of these spacings."""
SPACINGS = (" {} ", "{} ", "{}", " {}", "  {} ")
WORDS = (
    "is",
    "has",
    "was",
    "holds",
    "equals",
    "becomes",
    "means",
    "contains",
    "with",
    "reads",
    "says",
    "is set to",
    "as",
    "for",
    "shows",
    "gives",
    "at",
    "has the value",
    "to",
    "will be",
    "stands for",
    "field",
    "gets",
    "takes",
    "keeps",
    "comes to",
    "goes with",
    "belongs to",
    "counts",
    "names",
    "stores",
    "of",
    "on",
    "are",
    "now",
    "must be",
    "should be",
    "can be",
    "makes",
    "returns",
    "stays",
    "in",
    "by",
    "from",
    "carries",
    "turned into",
    "remains",
    "yields",
    "points to",
    "maps to",
    "needs",
    "wants",
    "it is",
    "that is",
    "looks like",
    "value",
    "called",
    "known as",
    "has been",
    "then",
)
"""Words between a field and its value."""
PHRASES = (" {} ", " now {} ", ", it {} ", " also {} ", " {} the value ")
QUOTES = ('"', "'")
"""Quotation marks around a value that is not a number."""
TITLES = split(
    """Record Data Input Entry Row Values Properties Settings Details Facts Attributes Card Item Profile Object Fields
    Info Document Form List Notes Sheet Options Parameters Contents Features Description Example Numbers Parts Summary
    Report Registry Inventory Table Line Case File Node Order Invoice Sample Member Message Request Response Product
    Event Header Payload"""
)
SHAPES = (
    "{}:\n",
    "# {}\n",
    "[{}]\n",
    "{}\n",
    "New {}:\n",
    "== {} ==\n",
    "The {}:\n",
    "({})\n",
    "-- {}\n",
    "Given {}:\n",
    "{} 1:\n",
    "<{}>\n",
    "{}...\n",
    "This is {}.\n",
    "** {} **\n",
    "{} below:\n",
    "// {}\n",
    "From {}:\n",
    "{}\n-----\n",
    "Here comes {}.\n",
)
"""Headings above the fields, if any."""
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
    return [_example(half, choice)]


def _example(half: Half, choice: random.Random) -> Example:
    links, openings, requests = _pools(half)
    link = choice.choice(links)
    opening, request = choice.choice(openings), choice.choice(requests)
    num_fields, quote, parts = choice.choice(NUM_FIELDS), choice.choice(QUOTES), {link, opening, request}
    record: dict[str, str | int] = {}
    while len(record) < num_fields:
        key, (value, words) = field(half, choice), _value(half, choice)
        if not parts & {key, *words}:  # a record contains no duplicates
            record[key] = value
            parts |= {key, *words}
    lines = [f"{key}{link}{_written(value, quote)}\n" for key, value in record.items()]
    prompt = opening + "".join(lines) + f"\n{request}\n"
    return Example(prompt, json.dumps(record), frozenset(parts - {""}))


@cache
def _pools(half: Half) -> tuple[tuple[str, ...], ...]:
    """Links, openings and requests."""
    words_and_shapes = [(signs, shape) for signs, shapes in ((SIGNS, SPACINGS), (WORDS, PHRASES)) for shape in shapes]
    links = [link for words, shape in words_and_shapes for word in words if half_of(link := shape.format(word)) is half]
    openings = [text for shape in SHAPES for title in TITLES if half_of(text := shape.format(title)) is half]
    openings += [""] * (len(openings) // 20)
    return tuple(links), tuple(openings), of_half(REQUESTS, half)


def _written(value: str | int, quote: str) -> str:
    return f"{quote}{value}{quote}" if isinstance(value, str) else str(value)


def _value(half: Half, choice: random.Random) -> tuple[str | int, list[str]]:
    """A value, and its parts."""
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
