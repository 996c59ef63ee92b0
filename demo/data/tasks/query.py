"""question → SQL: a table with its columns, and a question that one SELECT answers."""

import random
from dataclasses import dataclass
from functools import cache

from lorikeet.demo.data.tasks.example import Example, Half, composed
from lorikeet.demo.data.tasks.words import field, noun, number, plural, proper_name

NUM_COLUMNS = (3, 4, 5)

TABLES = (
    "Table {table}",
    "The table {table}",
    "# {table}",
    "TABLE {table}",
    "Schema: {table}",
    "We have {table}",
    "Given {table}",
)
COLUMNS = (
    ": {columns}",
    " ( {columns} )",
    " has {columns}.",
    " with {columns}.",
    " has the columns {columns}.",
    "\nColumns: {columns}",
    " -> {columns}",
    " with these columns: {columns}.",
)
ENDINGS = ("\n", "\nSQL:\n", "\nQuery:\n", "\nWrite SQL.\n", "\nAs SQL:\n")

VERBS = ("Show", "List", "Give me", "Find", "Return", "Print", "Get", "Tell me")
COUNTERS = (
    "How many {table} are there",
    "Count the {table}",
    "Count all {table}",
    "Number of {table}",
    "Give me the count of {table}",
    "Tell me how many {table} there are",
)
ONE = (" the {a} ", " every {a} ", " all {a} ", " each {a} ", " the {a} of {table} ", " {a} from {table} ")
TWO = (" {a} and {c} ", " the {a} and the {c} ", " {a} with {c} ", " both {a} and {c} ", " {a} and {c} of {table} ")
BOTH = (
    " {a} and {b} ",
    " the {a} and the {b} ",
    " {a} with {b} ",
    " {a} with their {b} ",
    " {a} and {b} from {table} ",
)
DIFFERENT = (" different {a} ", " every different {a} ", " the distinct {a} ", " all distinct {a} ", " unique {a} ")
ABOVE = (
    "whose {b} is above {number}",
    "where {b} is greater than {number}",
    "with {b} over {number}",
    "with a {b} above {number}",
    "where the {b} is more than {number}",
)
BELOW = (
    "whose {b} is below {number}",
    "where {b} is less than {number}",
    "with {b} under {number}",
    "with a {b} below {number}",
    "where the {b} is smaller than {number}",
)
AT_LEAST = (
    "with {b} of at least {number}",
    "where {b} is at least {number}",
    "whose {b} is {number} or more",
    "with a {b} of {number} or more",
    "where the {b} is not below {number}",
)
IS = (
    "where {b} is '{word}'",
    "whose {b} is '{word}'",
    "with {b} '{word}'",
    "for the {b} '{word}'",
    "with the {b} '{word}'",
    "where the {b} equals '{word}'",
)
HIGHEST = (
    "of the top {number} {table} by {b}",
    "of the {number} {table} with the highest {b}",
    "of the {number} {table} with the most {b}",
    "for the {number} highest {b}",
    "for the {number} largest {b}",
)
SORTED = ("sorted by {b}", "ordered by {b}", "in order of {b}", "in the order of {b}", "arranged by {b}")
PER = (" per {a}", " for each {a}", " for every {a}", " by {a}", " in each {a}", " grouped by {a}")
CHANGES = (
    "Set {a} to {number} ",
    "Change {a} to {number} ",
    "Update {a} to {number} ",
    "Change the {a} of {table} to {number} ",
    "Let {a} be {number} ",
    "Set the {a} of {table} to {number} ",
)
REMOVALS = (
    "Delete the {table} ",
    "Remove all {table} ",
    "Delete all {table} ",
    "Drop the {table} ",
    "Remove the {table} ",
    "Erase all {table} ",
)
OF_A = tuple(text.replace("{b}", "{a}") + " and " for text in IS)
STOPS = (".", "")

QUESTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "SELECT {a} FROM {table} WHERE {b} > {number};": (VERBS, ONE, ABOVE, STOPS),
    "SELECT {a} FROM {table} WHERE {b} < {number};": (VERBS, ONE, BELOW, STOPS),
    "SELECT {a}, {c} FROM {table} WHERE {b} = '{word}';": (VERBS, TWO, IS, STOPS),
    "SELECT COUNT(*) FROM {table} WHERE {b} = '{word}';": (COUNTERS, (" ",), IS, STOPS),
    "SELECT DISTINCT {a} FROM {table} WHERE {b} >= {number};": (VERBS, DIFFERENT, AT_LEAST, STOPS),
    "SELECT {a}, {b} FROM {table} ORDER BY {b} DESC LIMIT {number};": (VERBS, BOTH, HIGHEST, STOPS),
    "SELECT {a}, {b} FROM {table} ORDER BY {b};": (VERBS, BOTH, SORTED, STOPS),
    "SELECT {a}, COUNT(*) FROM {table} GROUP BY {a};": (COUNTERS, PER, STOPS),
    "UPDATE {table} SET {a} = {number} WHERE {b} = '{word}';": (CHANGES, IS, STOPS),
    "DELETE FROM {table} WHERE {a} = '{word}' AND {b} < {number};": (REMOVALS, OF_A, BELOW, STOPS),
}
"""Answers, and the columns of pieces of their questions."""


@dataclass(frozen=True)
class _Pools:
    schemas: tuple[str, ...]
    endings: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]
    """Each answer with all questions for it."""


def examples(half: Half, choice: random.Random) -> list[Example]:
    return [_example(half, choice)]


def _example(half: Half, choice: random.Random) -> Example:
    pools = _pools(half)
    schema, ending = choice.choice(pools.schemas), choice.choice(pools.endings)
    answer, questions = choice.choice(pools.questions)
    question = choice.choice(questions)
    num_columns = choice.choice(NUM_COLUMNS)
    columns: list[str] = []
    while len(columns) < num_columns:
        columns = list(dict.fromkeys([*columns, field(half, choice)]))
    slots = dict(zip("abc", choice.sample(columns, 3), strict=True))
    word, value = proper_name(half, choice), str(number(half, choice))
    filled = {
        "table": plural(noun(half, choice)),
        "columns": ", ".join(columns),
        "word": word,
        "number": value,
        **slots,
    }
    prompt = f"{schema.format(**filled)}\n{question.format(**filled)}{ending}"
    used = [text for slot, text in (("{word}", word), ("{number}", value)) if slot in question]
    parts = frozenset([schema, question, filled["table"], *columns, *used])
    return Example(prompt, answer.format(**filled), parts)


@cache
def _pools(half: Half) -> _Pools:
    questions = tuple((answer, composed(half, *columns)) for answer, columns in QUESTIONS.items())
    return _Pools(composed(half, TABLES, COLUMNS), ENDINGS, questions)
