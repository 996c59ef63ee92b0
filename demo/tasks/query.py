"""question → SQL: a table with its columns, and a question that one SELECT answers."""

import random
from dataclasses import dataclass
from functools import cache

from demo.tasks.example import Example, Half, of_half
from demo.tasks.words import field, noun, number, plural, proper_name

NUM_COLUMNS = (3, 4, 5)

SCHEMAS = (
    "Table {table}: {columns}",
    "The table {table} has {columns}.",
    "CREATE TABLE {table} ( {columns} );",
    "Table {table} has the columns {columns}",
    "Schema: {table} ( {columns} )",
    "# {table}: {columns}",
    "Table {table} with {columns}.",
    "We have {table} with the columns {columns}",
    "TABLE {table}\nCOLUMNS {columns}",
    "In {table} there are {columns}.",
)
ENDINGS = ("\n", "\nSQL:\n", "\nQuery:\n", "\nWrite SQL.\n", "\nAs SQL:\n")
QUESTIONS: dict[str, tuple[str, ...]] = {
    "SELECT {a} FROM {table} WHERE {b} > {number};": (
        "Which {a} have a {b} above {number}?",
        "Show the {a} of all {table} whose {b} is above {number}.",
        "List {a} where {b} is greater than {number}.",
        "Give me every {a} with {b} over {number}.",
        "Find each {a} whose {b} is greater than {number}.",
    ),
    "SELECT {a} FROM {table} WHERE {b} < {number};": (
        "Which {a} have a {b} below {number}?",
        "Show the {a} of all {table} whose {b} is below {number}.",
        "List {a} where {b} is less than {number}.",
        "Give me every {a} with {b} under {number}.",
        "Find each {a} whose {b} is less than {number}.",
    ),
    "SELECT {a}, {c} FROM {table} WHERE {b} = '{word}';": (
        "Show {a} and {c} where {b} is '{word}'.",
        "Which {a} and {c} belong to the {b} '{word}'?",
        "List the {a} and the {c} of {table} whose {b} is '{word}'.",
        "Give me {a} and {c} for the {b} '{word}'.",
        "Find {a} and {c} of {table} where {b} is '{word}'.",
    ),
    "SELECT COUNT(*) FROM {table} WHERE {b} = '{word}';": (
        "How many {table} have the {b} '{word}'?",
        "Count the {table} whose {b} is '{word}'.",
        "How many {table} are there where {b} is '{word}'?",
        "Number of {table} with {b} '{word}'?",
        "Count all {table} with the {b} '{word}'.",
    ),
    "SELECT DISTINCT {a} FROM {table} WHERE {b} >= {number};": (
        "Which different {a} have a {b} of at least {number}?",
        "List every different {a} where {b} is at least {number}.",
        "Show the different {a} of {table} whose {b} is {number} or more.",
        "What different {a} are there with {b} of {number} or more?",
        "Show all different {a} where {b} is at least {number}.",
    ),
    "SELECT {a}, {b} FROM {table} ORDER BY {b} DESC LIMIT {number};": (
        "Show the {number} {table} with the highest {b}: {a} and {b}.",
        "Which {a} are the top {number} by {b}? Show {b} too.",
        "List {a} and {b} of the {number} {table} with the most {b}.",
        "Give me {a} and {b}, highest {b} first, {number} of them.",
        "Show {a} and {b} of the top {number} {table} by highest {b}.",
    ),
    "SELECT {a}, {b} FROM {table} ORDER BY {b};": (
        "Show {a} and {b} of all {table}, sorted by {b}.",
        "List all {a} with their {b} in order of {b}.",
        "Sort the {table} by {b} and show {a} and {b}.",
        "Give me {a} and {b} ordered by {b}.",
        "List {a} and {b} of the {table} sorted by {b}.",
    ),
    "SELECT {a}, COUNT(*) FROM {table} GROUP BY {a};": (
        "How many {table} are there per {a}?",
        "Count the {table} for each {a}.",
        "Number of {table} for every {a}?",
        "For each {a}, how many {table} are there?",
        "Count all {table} per {a}.",
    ),
    "UPDATE {table} SET {a} = {number} WHERE {b} = '{word}';": (
        "Set {a} to {number} where {b} is '{word}'.",
        "Change the {a} of {table} with {b} '{word}' to {number}.",
        "For the {b} '{word}', set {a} to {number}.",
        "Update {a} to {number} in {table} whose {b} is '{word}'.",
        "Change {a} to {number} where the {b} is '{word}'.",
    ),
    "DELETE FROM {table} WHERE {a} = '{word}' AND {b} < {number};": (
        "Delete the {table} whose {a} is '{word}' and whose {b} is below {number}.",
        "Remove all {table} with {a} '{word}' and {b} under {number}.",
        "Delete from {table} where {a} is '{word}' and {b} is less than {number}.",
        "Remove {table} where {a} is '{word}' and {b} below {number}.",
        "Delete all {table} with {a} '{word}' and {b} less than {number}.",
    ),
}


@dataclass(frozen=True)
class _Pools:
    schemas: tuple[str, ...]
    endings: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    """Question and answer."""


def examples(half: Half, choice: random.Random) -> list[Example]:
    return [_example(half, choice)]


def _example(half: Half, choice: random.Random) -> Example:
    pools = _pools(half)
    schema, ending = choice.choice(pools.schemas), choice.choice(pools.endings)
    question, answer = choice.choice(pools.questions)
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
    parts = frozenset([schema, ending, question, filled["table"], *columns, *used])
    return Example(prompt, answer.format(**filled), parts)


@cache
def _pools(half: Half) -> _Pools:
    questions = [(question, answer) for answer, phrasings in QUESTIONS.items() for question in of_half(phrasings, half)]
    return _Pools(of_half(SCHEMAS, half), of_half(ENDINGS, half), tuple(questions))
