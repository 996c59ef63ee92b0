"""The tasks of SmolLM2's adapters: a conversation of one or more turns, and the one right answer to it."""

import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from lorikeet.demo.smollm2 import words
from lorikeet.demo.smollm2.words import Choice

ROUTE = "route"
"""The system message that invokes the activated LoRA."""


@dataclass(frozen=True)
class Example:
    """A conversation and its answer."""

    messages: list[dict[str, str]]
    """What the adapter gets."""
    instruction: str
    """What tells the bare model what to do: it comes before the last message, which is otherwise the same."""
    answer: str
    tables: str = ""
    """SQL that makes the tables of a query; empty for other tasks."""

    def base_messages(self) -> list[dict[str, str]]:
        """The conversation with an instruction, for a model without the adapter."""
        *earlier, last = self.messages
        content = self.instruction if last["role"] == "system" else f"{self.instruction}\n\n{last['content']}"
        return [*earlier, {"role": "user", "content": content}]

    def score(self, text: str) -> float:
        """Whether the text is right, or how much of it, from 0 to 1."""
        text = text.strip()
        if self.tables:
            return float(_rows(self.tables, text) == _rows(self.tables, self.answer))
        if self.answer.startswith("{"):
            right, got = json.loads(self.answer), _parsed(text)
            fields = got.items() if isinstance(got, dict) else ()
            return sum(field in fields for field in right.items()) / max(len(right), len(fields))
        if self.answer.startswith('"') or self.answer in DEPARTMENTS:
            return float(text == self.answer)
        return _overlap(text, self.answer)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _parsed(text: str) -> object:
    """The first JSON object of a text; None without one."""
    start = text.find("{")
    try:
        return json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else None
    except ValueError:
        return None


def _rows(tables: str, query: str) -> object:
    """What a query returns; None if it fails."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(tables)
        match = re.search(r"\bSELECT\b[^;`]*", query, re.IGNORECASE)
        return connection.execute(match.group() if match else "").fetchall()
    except (sqlite3.Error, sqlite3.Warning):
        return None
    finally:
        connection.close()


def _overlap(text: str, answer: str) -> float:
    """F1 of their words."""
    got, right = (re.findall(r"[\w']+", each.lower()) for each in (text, answer))
    common = sum(min(got.count(word), right.count(word)) for word in set(got))
    return 2 * common / (len(got) + len(right)) if got and right else 0.0


# JSON from a sentence


def json_example(choice: Choice) -> Example:
    """A sentence about a person, an order or a meeting."""
    kind = choice.any(("person", "order", "meeting"))
    first, last = choice.word(words.FIRST), choice.word(words.LAST)
    if kind == "person":
        age, job, city = choice.number(18, 90), choice.word(words.JOBS), choice.word(words.CITIES)
        text = choice.any(
            (
                f"{first} {last}, {age}, works as a {job} in {city}.",
                f"The {job} {first} {last} lives in {city} and is {age} years old.",
                f"{first} {last} is a {age}-year-old {job} from {city}.",
                f"In {city} we met {first} {last} ({age}), a {job}.",
            )
        )
        value: dict[str, object] = {"name": f"{first} {last}", "age": age, "job": job, "city": city}
    elif kind == "order":
        count, colour, item = choice.number(2, 60), choice.word(words.COLOURS), choice.word(words.ITEMS)
        text = choice.any(
            (
                f"{first} {last} ordered {count} {colour} {item}s.",
                f"Please send {count} {colour} {item}s to {first} {last}.",
                f"We sold {count} {item}s in {colour} to {first} {last}.",
                f"{count} {colour} {item}s were bought by {first} {last}.",
            )
        )
        value = {"customer": f"{first} {last}", "item": item, "colour": colour, "quantity": count}
    else:
        topic, day, hour = choice.word(words.TOPICS), choice.word(words.DAYS), choice.number(8, 18)
        room = choice.number(100, 420)
        text = choice.any(
            (
                f"The {topic} meeting is on {day} at {hour}:00 in room {room}.",
                f"On {day} at {hour}:00 we meet in room {room} to talk about {topic}.",
                f"{first} invites you to room {room} on {day}, {hour}:00: {topic}.",
                f"Room {room} is booked for the {topic} meeting on {day} at {hour}:00.",
            )
        )
        value = {"topic": topic, "day": day, "time": f"{hour}:00", "room": room}
    keys = ", ".join(value)
    return Example(
        _user(text), f"Write what this sentence says as one JSON object with the keys {keys}.", json.dumps(value)
    )


# SQL from a table and a question

_TABLES: tuple[tuple[str, str, str, tuple[str, ...], str], ...] = (
    # table, what a row is called, column of a name, columns of text, column of a number
    ("films", "film", "title", ("genre", "country"), "year"),
    ("employees", "employee", "name", ("department", "city"), "salary"),
    ("orders", "order", "customer", ("city", "status"), "total"),
    ("books", "book", "title", ("author", "language"), "pages"),
    ("houses", "house", "address", ("city", "colour"), "price"),
    ("students", "student", "name", ("course", "city"), "age"),
    ("flights", "flight", "number", ("airline", "destination"), "seats"),
    ("players", "player", "name", ("team", "country"), "goals"),
    ("cars", "car", "model", ("brand", "colour"), "price"),
    ("dogs", "dog", "name", ("breed", "colour"), "weight"),
    ("songs", "song", "title", ("artist", "genre"), "length"),
    ("hotels", "hotel", "name", ("city", "country"), "rooms"),
    ("invoices", "invoice", "customer", ("status", "country"), "amount"),
    ("tickets", "ticket", "subject", ("status", "team"), "priority"),
    ("teams", "team", "name", ("city", "sport"), "points"),
    ("shops", "shop", "name", ("owner", "city"), "sales"),
)
_VALUES = words.CITIES + words.COLOURS + words.LAST


def sql_example(choice: Choice) -> Example:
    """A table with its columns, and a question that one statement answers."""
    table, _, name, texts, number = choice.word(_TABLES)
    plural = table
    columns = [name, *texts, number]
    column, value, limit = choice.any(texts), choice.word(_VALUES), choice.number(10, 900)
    top = choice.number(2, 20)
    question, query = choice.any(
        (
            (f"Which {plural} have the {column} {value}?", f"SELECT {name} FROM {table} WHERE {column} = '{value}';"),
            (
                f"How many {plural} have the {column} {value}?",
                f"SELECT COUNT(*) FROM {table} WHERE {column} = '{value}';",
            ),
            (f"Which {plural} have a {number} above {limit}?", f"SELECT {name} FROM {table} WHERE {number} > {limit};"),
            (f"Which {plural} have a {number} below {limit}?", f"SELECT {name} FROM {table} WHERE {number} < {limit};"),
            (f"What is the average {number} of all {plural}?", f"SELECT AVG({number}) FROM {table};"),
            (
                f"What is the highest {number} of the {plural} with the {column} {value}?",
                f"SELECT MAX({number}) FROM {table} WHERE {column} = '{value}';",
            ),
            (
                f"List the {top} {plural} with the highest {number}.",
                f"SELECT {name} FROM {table} ORDER BY {number} DESC LIMIT {top};",
            ),
            (
                f"How many {plural} are there for each {column}?",
                f"SELECT {column}, COUNT(*) FROM {table} GROUP BY {column};",
            ),
        )
    )
    text = f"Table: {table}({', '.join(columns)})\n{question}"
    instruction = "Write one SQL query that answers the question. Write only the query."
    return Example(_user(text), instruction, query, tables=_filled(table, columns, (column, value), limit))


def _filled(table: str, columns: list[str], asked: tuple[str, str], limit: int) -> str:
    """SQL that makes the table, with rows on both sides of every condition."""
    rows = []
    for index in range(24):
        row = {name: f"'{name} {index % 5}'" for name in columns}
        row[columns[0]] = f"'row {index}'"
        row[columns[-1]] = str(limit - 60 + index * 5)
        if index % 3 == 0:
            row[asked[0]] = f"'{asked[1]}'"
        rows.append(f"({', '.join(row.values())})")
    return f"CREATE TABLE {table}({', '.join(columns)}); INSERT INTO {table} VALUES {', '.join(rows)};"


# A title for a note

_SUBJECTS = (
    "printer",
    "heating",
    "lift",
    "coffee machine",
    "projector",
    "front door",
    "alarm",
    "dishwasher",
    "photocopier",
    "parking gate",
    "fridge",
    "wireless network",
    "shredder",
    "water tap",
    "air conditioning",
    "telephone",
)
_EVENTS = (
    ("is broken", "does not work any more"),
    ("leaks", "has been losing water"),
    ("needs a new filter", "wants a filter"),
    ("makes a strange noise", "has been humming and rattling"),
    ("was repaired", "works again, as a technician came"),
    ("will be replaced", "is old, and a new one has been ordered"),
    ("is locked", "cannot be opened by anybody"),
    ("smells of smoke", "gives off a smell as if something burned"),
)
_WHERE = (
    "on the third floor",
    "in the kitchen",
    "in room 214",
    "near the exit",
    "in the basement",
    "in the small office",
    "on the second floor",
    "in the meeting room",
    "in the workshop",
    "next to the stairs",
    "in room 318",
    "in the canteen",
)


def title_example(choice: Choice) -> Example:
    """A note of a few sentences; its title says what is the matter, and where."""
    subject, where = choice.word(_SUBJECTS), choice.word(_WHERE)
    short, long = choice.any(_EVENTS)
    day, name = choice.word(words.DAYS), choice.word(words.FIRST)
    fact = f"the {subject} {where} {long}"
    opening = choice.any(
        (
            f"Since {day}, {fact}.",
            f"Hello all, {fact}.",
            f"{name} says that {fact}.",
            f"As some of you noticed on {day}, {fact}.",
        )
    )
    rest = choice.random.sample(
        (
            f"{name} has called the caretaker.",
            "We are sorry for the trouble.",
            f"We will know more by {day}.",
            "Please tell your colleagues.",
            "If you have questions, come to the front desk.",
            f"{name} looked at it twice already.",
            "Thank you for your patience!",
        ),
        choice.random.randint(2, 3),
    )
    note = " ".join([opening, *rest])
    title = f"{subject} {where} {short}"
    return Example(_user(note), "Write a short title for this note, without quotation marks.", title.capitalize())


# A pirate's voice

_PIRATE = {
    "hello": "ahoy",
    "hi": "ahoy",
    "friend": "matey",
    "friends": "mateys",
    "my": "me",
    "you": "ye",
    "your": "yer",
    "is": "be",
    "are": "be",
    "am": "be",
    "yes": "aye",
    "money": "doubloons",
    "room": "cabin",
    "floor": "deck",
    "boss": "captain",
    "team": "crew",
    "beer": "grog",
    "water": "bilge water",
    "stop": "avast",
    "kitchen": "galley",
    "car": "ship",
    "flag": "jolly roger",
    "woman": "lass",
    "man": "lad",
    "was": "were",
    "of": "o'",
    "and": "an'",
    "the": "th'",
    "to": "t'",
    "for": "fer",
}
_SPOKEN = (
    "Hello, my friend. Where is the {item}?",
    "You are late, {name}. The boss is angry.",
    "My car is full of {item}s and {colour} paint.",
    "Is the {item} in your room?",
    "I gave my money to {name} for the {item}.",
    "Hi {name}, are you my friend?",
    "The man from {city} is the boss of the team.",
    "Yes, I am in the kitchen and your {item} is here.",
    "Stop! The {item} is for the woman from {city}.",
    "There is water on the floor of the room.",
    "We drink beer and wait for {name}.",
    "My team is in {city} and you are not.",
    "The {colour} flag of my car is gone.",
    "Are you the man with the {colour} {item}?",
    "{name} and my friends are on the way to {city}.",
    "You and your team are welcome in {city}.",
)


def pirate_example(choice: Choice) -> Example:
    """One or two sentences, said by a pirate."""
    sentences = [
        choice.word(_SPOKEN).format(
            item=choice.word(words.ITEMS),
            name=choice.word(words.FIRST),
            colour=choice.word(words.COLOURS),
            city=choice.word(words.CITIES),
        )
        for _ in range(choice.random.randint(1, 2))
    ]
    text = " ".join(sentences)
    instruction = "Rewrite this text as a pirate would say it. Write only the new text."
    return Example(_user(text), instruction, f"{_spoken(text)} Arr!")


def _spoken(text: str) -> str:
    def replaced(match: re.Match[str]) -> str:
        word = _PIRATE.get(match.group().lower(), match.group())
        return word[0].upper() + word[1:] if match.group()[0].isupper() else word

    return re.sub(r"[A-Za-z]+", replaced, text)


# Citing from a given text

_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "When does the {place} open?",
        ("The {place} opens at {hour} o'clock.", "Visitors enter the {place} from {hour} o'clock."),
    ),
    (
        "Who runs the {place}?",
        ("The {place} is run by {first} {last}.", "{first} {last} has been running the {place} for years."),
    ),
    (
        "How old is the {place}?",
        ("The {place} was built {number} years ago.", "It is {number} years since the {place} was built."),
    ),
    (
        "What does the {place} cost?",
        ("A ticket for the {place} costs {number} euros.", "For the {place} one pays {number} euros."),
    ),
    ("Where is the {place}?", ("The {place} stands in {last} Street.", "You find the {place} in {last} Street.")),
    ("When is the {place} closed?", ("On {day} the {place} is closed.", "The {place} does not open on {day}.")),
    (
        "How many people work at the {place}?",
        ("At the {place} work {number} people.", "The {place} has {number} workers."),
    ),
)


def cite_example(choice: Choice) -> Example:
    """Numbered sentences, and a question that one of them answers."""
    number = choice.random.randint(3, 5)
    asked = choice.random.randrange(number)
    places, lines, questions = choice.words(words.PLACES, 2), [], []
    pairs = choice.random.sample([(place, fact) for place in places for fact in _FACTS], number)
    for place, (question, sentences) in pairs:
        fields = {
            "place": place,
            "hour": str(choice.number(6, 12)),
            "first": choice.word(words.FIRST),
            "last": choice.word(words.LAST),
            "number": str(choice.number(2, 400)),
            "day": choice.word(words.DAYS),
        }
        lines.append(choice.any(sentences).format(**fields))
        questions.append(question.format(**fields))
    text = "\n".join(f"[{index + 1}] {line}" for index, line in enumerate(lines))
    instruction = (
        "Quote the one sentence that answers the question, word for word, in quotation marks, and then its number in "
        'square brackets, like this: "The sun is a star." [2]'
    )
    return Example(_user(f"{text}\n\n{questions[asked]}"), instruction, f'"{lines[asked]}" [{asked + 1}]')


# The department for a conversation: an activated LoRA

DEPARTMENTS: dict[str, tuple[str, ...]] = {
    "billing": (
        "I was charged twice for the {item}.",
        "My invoice for the {item} has a wrong amount.",
        "Why did you take {number} euros from my card?",
        "Can I pay for the {item} in two parts?",
        "The refund for my {item} has not reached my bank.",
        "There is a fee on my bill that I do not know.",
        "I need a receipt with my company's tax number.",
        "The discount is missing on the bill for my {item}.",
    ),
    "delivery": (
        "My {item} has not arrived yet.",
        "The parcel with the {item} was left in the rain.",
        "Can you send the {item} to {city} instead?",
        "When will the courier bring my {item}?",
        "The tracking page says that my {item} is in {city}.",
        "The driver rang at the wrong house.",
        "Please ship the {item} before {day}.",
        "My parcel has been stuck in {city} since {day}.",
    ),
    "returns": (
        "I want to send the {item} back.",
        "The {item} is too small, and I would like another size.",
        "How long can I return a {item}?",
        "I do not like the {colour} {item} and want to give it back.",
        "Please send me a return label for the {item}.",
        "Can I exchange the {colour} {item} for a {colour} one?",
        "I changed my mind and do not want to keep the {item}.",
        "I bought the wrong {item}: can I swap it?",
    ),
    "technical": (
        "The {item} does not switch on.",
        "My {item} makes a loud noise and then stops.",
        "How do I connect the {item} to my phone?",
        "The display of the {item} stays black.",
        "The app crashes when I add the {item}.",
        "The battery of the {item} is empty after an hour.",
        "The {item} shows error {number}.",
        "After the update, my {item} works no longer.",
    ),
    "account": (
        "I forgot my password.",
        "How do I change my e-mail address?",
        "Please delete my account.",
        "I cannot log in since {day}.",
        "My account is locked.",
        "Somebody else uses my login.",
        "How can I change the name in my profile?",
        "I did not get the mail to confirm my registration.",
    ),
}
_REPLIES = (
    "I am sorry to hear that. Let me look into it for you.",
    "Thank you for your message. We will help you right away.",
    "Could you give me your order number, please?",
    "I understand. Please wait a moment while I check.",
    "Of course. I am happy to help you with that.",
    "I'm sorry, but I don't have access to your data. Please contact us.",
)


def route_example(choice: Choice) -> Example:
    """A customer's conversation, which belongs to one department."""
    department = choice.any(tuple(DEPARTMENTS))
    fields = {
        "item": choice.word(words.ITEMS),
        "number": str(choice.number(10, 400)),
        "city": choice.word(words.CITIES),
        "day": choice.word(words.DAYS),
        "colour": choice.word(words.COLOURS),
    }
    complaint = choice.word(DEPARTMENTS[department]).format(**fields)
    opening = choice.any(("", "", "Hello! ", "Good morning. ", "Hi, a question: "))
    messages = [
        {"role": "user", "content": opening + complaint},
        {"role": "assistant", "content": choice.any(_REPLIES)},
        {"role": "system", "content": ROUTE},
    ]
    names = ", ".join(DEPARTMENTS)
    instruction = f"Which department is this for? Answer with one word of these: {names}."
    return Example(messages, instruction, department)


TASKS: dict[str, Callable[[Choice], Example]] = {
    "json": json_example,
    "sql": sql_example,
    "title": title_example,
    "pirate": pirate_example,
    "cite": cite_example,
    ROUTE: route_example,
}
"""By the adapter's name."""


def examples(task: str, count: int, *, held_out: bool) -> list[Example]:
    """Different examples of a task; every call gives equal ones."""
    choice = Choice(f"{task} {'held out' if held_out else 'training'}", held_out=held_out)
    drawn: dict[str, Example] = {}
    while len(drawn) < count:
        example = TASKS[task](choice)
        drawn[str(example.messages)] = example
    return list(drawn.values())
