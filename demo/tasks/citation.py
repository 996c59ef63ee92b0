"""text → citation: several passages, each under a title, and the request to quote one of them.

The answer is the passage, word for word: at least 48 tokens of names and numbers that nobody could guess.
"""

import random
from functools import cache

from demo.tasks.example import Example, Half, of_half
from demo.tasks.words import noun, number, proper_name

NUM_PASSAGES = (2, 3)
MIN_CHARS = (130, 145)

SENTENCES = (
    "The {noun} in {place} was repaired by {person} after {number} days.",
    "{person} found {number} pieces of {noun} near {place}.",
    "In {place} nobody owns a {noun} except {person}.",
    "A {noun} from {place} costs {number} coins, says {person}.",
    "{person} and {person} carried the {noun} from {place} to {place}.",
    "Every {noun} that leaves {place} is counted by {person}.",
    "On day {number} the {noun} of {person} arrived in {place}.",
    "The road from {place} to {place} is {number} miles long.",
    "{person} of {place} collects {noun} number {number}.",
    "There are {number} ways to build a {noun}, and {person} knows them all.",
    "When {person} came to {place}, the {noun} was already sold.",
    "Only {number} people in {place} have seen the {noun} of {person}.",
    "{person} wrote {number} letters about the {noun} of {place}.",
    "The old {noun} belongs to {person}, who lives in {place}.",
    "It took {person} {number} hours to reach {place}.",
    "Without a {noun} the people of {place} could not help {person}.",
    "{place} sells {number} of its best {noun} to {place} each year.",
    "Nothing in {place} is older than the {noun} of {person}.",
    "{person} asked {person} for the {noun} and got {number} coins instead.",
    "Between {place} and {place} lies the {noun} that {person} lost.",
    "The museum of {place} shows {number} copies of the {noun}.",
    "As soon as the {noun} broke, {person} called {person}.",
    "{number} boxes of {noun} were sent to {person} in {place}.",
    "The {noun} weighs {number} pounds and was made in {place}.",
    "Last year {person} sold the {noun} to a friend from {place}.",
    "Both {person} and {person} were born in {place}.",
    "The {noun} stood in {place} until {person} moved it.",
    "{person} still keeps {number} pictures of {place}.",
    "If the {noun} fails, {person} will return to {place}.",
    "Year {number} was a good one for the {noun} of {place}.",
    "According to {person}, the {noun} came from {place}.",
    "{place} has {number} doors and not one {noun}.",
    "{person} paid {number} coins for a {noun} without asking {person}.",
    "For {number} years {person} was the only teacher in {place}.",
    "They named the {noun} after {person}, the founder of {place}.",
    "{person} teaches {number} children how to use a {noun}.",
    "Since then {place} has had no {noun} at all.",
    "The first {noun} was shown by {person} in {place}.",
    "Some say that {person} hid the {noun} under the gate of {place}.",
    "From {place} one can see the {noun} of {person}.",
    "Whoever needs a {noun} goes to {person} first.",
    "{person} left {place} with {number} coins and a {noun}.",
    "Neither {person} nor {person} could lift the {noun}.",
    "More than {number} visitors came to {place} for the {noun}.",
    "The price of {noun} in {place} has doubled since {person} left.",
    "{person} drew the {noun} on page {number} of the book.",
    "After the storm {place} had to borrow a {noun} from {place}.",
    "Our {noun} is made by {person} alone.",
    "{person} measured {number} feet from the {noun} to the door.",
    "Room {number} in {place} is where {person} keeps the {noun}.",
    "Yesterday {person} opened a shop for {noun} in {place}.",
    "Do not give the {noun} to {person} before day {number}.",
    "They say {place} was built by {person} in {number} nights.",
    "A picture of {person} hangs above the {noun}.",
    "{person} has the only key to the {noun} of {place}.",
    "At least {number} letters from {place} never reached {person}.",
    "Where the {noun} is now, only {person} can tell.",
    "{place} and {place} share one {noun} between them.",
    "{person} bought the {noun} in {place} and regrets it.",
    "Page {number} tells how {person} lost the {noun}.",
)
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
    "[{}]",
    "## {}",
    "{}:",
    "<{}>",
    "* {} *",
    "-- {} --",
    "({})",
    "Section {}",
    "Note {}:",
    "# {}",
    "Passage {}:",
    "=== {} ===",
    "Title: {}",
    "Source {}",
    "{{{}}}",
    "> {}",
    "Document {}:",
    "'{}'",
    '"{}"',
    "Chapter {}.",
    "{} -",
    "File {}:",
)
REQUESTS = (
    "Quote {}:",
    "Cite {}:",
    "Quote the passage {}.",
    "What does {} say?",
    "Repeat {} word for word:",
    "Question: What is written under {}?",
    "Copy the text of {}.",
    "Which text belongs to {}?",
    "Give me {} as it stands.",
    "Show the passage with the title {}.",
    "Please quote {} exactly.",
    "Question: what does it say about {}?",
    "Citation of {}:",
    "Return the text called {}.",
    "Print {}.",
    "Write down what {} says.",
    "I need the words of {}:",
    "Read {} aloud.",
    "Tell me what stands in {}.",
    "The full text of {} is:",
    "Find {} and quote it.",
    "Answer with the passage {}:",
    "Extract {} from the text above.",
    "How does {} read?",
    "Select {}.",
    "Look up {}:",
    "Can you cite {}?",
    "Now quote {} for me.",
)


def examples(half: Half, choice: random.Random) -> list[Example]:
    """One per passage, in an order of chance, about the same passages under the same titles."""
    openings, titles, requests, sentences = _pools(half)
    opening, title = choice.choice(openings), choice.choice(titles)
    num_passages = choice.choice(NUM_PASSAGES)
    labels: list[str] = []
    while len(labels) < num_passages:
        labels = list(dict.fromkeys([*labels, proper_name(half, choice)]))
    deck = choice.sample(sentences, len(sentences))
    passages = [_passage(deck, half, choice) for _ in labels]
    context = opening + "".join(
        f"{title.format(label)}\n{text}\n\n" for label, (text, _) in zip(labels, passages, strict=True)
    )
    parts = frozenset([title, *labels, *(part for _, used in passages for part in used)]) | ({opening} - {""})
    found = []
    for label, (text, _) in zip(labels, passages, strict=True):
        request = choice.choice(requests)
        found.append(Example(f"{context}{request.format(label)}\n", text, parts | {request}))
    choice.shuffle(found)
    return found


@cache
def _pools(half: Half) -> tuple[tuple[str, ...], ...]:
    openings = ("", *of_half([opening for opening in OPENINGS if opening], half))
    return openings, of_half(TITLES, half), of_half(REQUESTS, half), of_half(SENTENCES, half)


def _passage(deck: list[str], half: Half, choice: random.Random) -> tuple[str, set[str]]:
    """The text, and what it was made of. Templates come from the top of the deck and go back to its bottom."""
    min_chars = choice.choice(MIN_CHARS)
    text, used = "", set()
    while len(text) < min_chars:
        template = deck.pop(0)
        deck.append(template)
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
