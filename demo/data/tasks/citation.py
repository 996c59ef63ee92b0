"""text → citation: several passages, each under a title, and the request to quote one of them.

The answer is the passage, word for word: at least 48 tokens of names and numbers that cannot be predicted.
"""

import random
from collections.abc import Sequence
from functools import cache

from lorikeet.demo.data.tasks.example import Example, Half, composed, of_half
from lorikeet.demo.data.tasks.words import noun, number, proper_name, split

NUM_PASSAGES = (2, 3)
MIN_CHARS = (130, 145)

SUBJECTS = (
    "{person}",
    "{person} and {person}",
    "{person} of {place}",
    "Nobody but {person}",
    "In {place} {person}",
    "On day {number} {person}",
    "The {noun} of {place}",
    "A {noun} from {place}",
    "Every {noun} in {place}",
    "Only {number} people",
    "Without a {noun} {person}",
    "For {number} years {person}",
    "The teacher of {person}",
    "Whoever needs a {noun}",
)
VERBS = split(
    """found sold repaired counted carried drew hid borrowed kept moved left asked built weighed measured named bought
    lost showed reached opened shared collected painted followed remembered"""
)
OBJECTS = (
    " the {noun}",
    " {number} pieces of {noun}",
    " a {noun} from {place}",
    " the oldest {noun}",
    " {person}",
    " {number} letters",
    " the road to {place}",
    " its best {noun}",
    " room {number}",
    " both {noun} and {noun}",
    " page {number} of the book",
    " no {noun} at all",
)
ENDS = (
    ".",
    " in {place}.",
    " near {place}.",
    " after {number} days.",
    " for {person}.",
    " without {person}.",
    " for {number} coins.",
    " before the storm.",
    " by night.",
    " with a {noun}.",
    ", says {person}.",
    " between {place} and {place}.",
)
"""A sentence is composed of one of each, with too many combinations to predict the next word."""
OPENINGS = (
    "",
    "",
    "Notes:\n\n",
    "Documents\n\n",
    "Here are some passages.\n\n",
    "Context:\n\n",
    "Read this first.\n\n",
    "Sources:\n\n",
    "The following texts are given.\n\n",
    "# Context\n\n",
    "Below is what we know.\n\n",
    "Text:\n\n",
    "Archive of the library\n\n",
    "Use only these passages:\n\n",
)
TITLES = (
    ("", "## ", "# ", "> ", "Section ", "Note ", "Passage ", "Title: ", "Source ", "Document ", "Chapter ", "File "),
    ("{}", "[{}]", "<{}>", "({})", "'{}'", '"{}"', "* {} *", "-- {} --", "=== {} ==="),
    ("", ":", ".", " -"),
)
REQUESTS = (
    ("Quote", "Cite", "Repeat", "Copy", "Print", "Show", "Give me", "Find", "Return", "Read", "Select", "Look up"),
    (" {}", " the passage {}", " the text of {}", " what {} says", " the words of {}", " all of {}"),
    (":", ".", " word for word:", " exactly.", ", please.", " as it stands."),
)
"""Each is composed of one piece per column."""


def examples(half: Half, choice: random.Random) -> list[Example]:
    """One per passage, in random order, about the same passages and titles."""
    openings, titles, requests, sentences = _pools(half)
    opening, title = choice.choice(openings), choice.choice(titles)
    num_passages = choice.choice(NUM_PASSAGES)
    labels: list[str] = []
    while len(labels) < num_passages:
        labels = list(dict.fromkeys([*labels, proper_name(half, choice)]))
    passages = [_passage(sentences, half, choice) for _ in labels]
    context = opening + "".join(
        f"{title.format(label)}\n{text}\n\n" for label, (text, _) in zip(labels, passages, strict=True)
    )
    parts = frozenset([title, *labels, *(part for _, used in passages for part in used)]) | ({opening} - {""})
    cited = []
    for label, (text, _) in zip(labels, passages, strict=True):
        request = choice.choice(requests)
        cited.append(Example(f"{context}{request.format(label)}\n", text, parts | {request}))
    choice.shuffle(cited)
    return cited


@cache
def _pools(half: Half) -> tuple[tuple[str, ...], ...]:
    openings = ("", *of_half([opening for opening in OPENINGS if opening], half))
    sentences = composed(half, SUBJECTS, tuple(f" {verb}" for verb in VERBS), OBJECTS, ENDS)
    return openings, composed(half, *TITLES), composed(half, *REQUESTS), sentences


def _passage(sentences: Sequence[str], half: Half, choice: random.Random) -> tuple[str, set[str]]:
    """The text, and its parts."""
    min_chars = choice.choice(MIN_CHARS)
    text, used = "", set()
    while len(text) < min_chars:
        template = choice.choice(sentences)
        sentence, slots = _fill(template, half, choice)
        text = f"{text} {sentence}" if text else sentence
        used |= {template, *slots}
    return text, used


def _fill(template: str, half: Half, choice: random.Random) -> tuple[str, list[str]]:
    text, used = template, []
    while (start := text.find("{")) >= 0:
        end = text.index("}", start)
        slot = text[start + 1 : end]
        value = _SLOTS[slot](half, choice)
        used.append(value)
        text = text[:start] + value + text[end + 1 :]
    return text, used


_SLOTS = {
    "noun": noun,
    "person": proper_name,
    "place": proper_name,
    "number": lambda half, choice: str(number(half, choice)),
}
