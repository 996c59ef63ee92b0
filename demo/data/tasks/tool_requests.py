"""The three functions of the adapter `tools`: their descriptions, requests that need them, their results, and the
sentences that tell a user these results.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

from lorikeet.demo.data.tasks.example import Half, composed, half_of
from lorikeet.demo.data.tasks.words import noun, number, proper_name, split

WEATHER, REMINDER, CONVERSION = "get_weather", "add_reminder", "convert"

DESCRIPTIONS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    WEATHER: (
        ("Get", "Look up", "Return", "Find", "Fetch", "Tell", "Shows", "Returns"),
        (" the weather", " the current weather", " the forecast", " today's weather", " temperature and sky"),
        ("", " in a city", " for a city", " of a place", " for a location"),
        ("", "."),
    ),
    REMINDER: (
        ("Add", "Create", "Set", "Store", "Schedule", "Save", "Adds", "Creates"),
        (" a reminder", " a new reminder", " an alarm with a text", " a note for later", " a task"),
        ("", " at a time", " for a time of the day", " in the calendar", " at a given time"),
        ("", "."),
    ),
    CONVERSION: (
        ("Convert", "Change", "Translate", "Recalculate", "Compute", "Converts"),
        (" an amount", " a quantity", " a value", " a number", " a measure"),
        ("", " from one unit to another", " between units", " into another unit", " of units or currencies"),
        ("", "."),
    ),
}
"""Each is composed of one piece per column."""
PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    WEATHER: {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    REMINDER: {"text": {"type": "string"}, "time": {"type": "string"}},
    CONVERSION: {"amount": {"type": "number"}, "from": {"type": "string"}, "to": {"type": "string"}},
}

STOPS = ("", ".", "!", ", please.")
WEATHER_QUESTIONS = (
    (
        "What is the weather",
        "What's the weather like",
        "How is the weather",
        "Tell me the weather",
        "Show me the weather",
        "What is the forecast",
        "I need the weather",
        "Check the weather",
        "Give me the weather",
        "weather",
        "How warm is it",
        "Is it cold",
        "Look up the temperature",
        "Will it rain",
    ),
    (" in {city}", " for {city}", " over in {city}", " today in {city}", " right now in {city}"),
    ("{unit}", "{unit}", "{unit} today", ", I mean{unit}"),
    ("?", ".", "", ", please?"),
)
UNITS_OF_WEATHER = {
    "": "celsius",
    " in celsius": "celsius",
    " in degrees celsius": "celsius",
    " (celsius)": "celsius",
    " in fahrenheit": "fahrenheit",
    " in degrees fahrenheit": "fahrenheit",
    " (fahrenheit)": "fahrenheit",
}
CITIES = split(
    """Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Oslo Stockholm Helsinki Athens Budapest
    Brussels Amsterdam Zurich Geneva Munich Hamburg Milan Naples Barcelona Porto Cairo Lagos Nairobi Tokyo Osaka Kyoto
    Seoul Beijing Shanghai Mumbai Delhi Bangkok Hanoi Jakarta Manila Sydney Melbourne Perth Auckland Toronto Montreal
    Boston Chicago Denver Seattle Dallas Houston Miami Atlanta Lima Bogota Santiago Havana Moscow Istanbul Ankara"""
)
BEFORE_A_CITY = split("New San Port Lake Santa Fort Mount East North Old")

TASKS = (
    "call {person}",
    "write to {person}",
    "pick up {person}",
    "meet {person} and {person}",
    "buy a {noun}",
    "buy {number} of the {noun}",
    "clean the {noun}",
    "repair the {noun} of {person}",
    "pay {person} for the {noun}",
    "return the {noun} to {person}",
    "water the {noun}",
    "bring {person} the {noun}",
    "pack the {noun} and the {noun}",
    "cancel the {noun}",
    "look for the {noun}",
    "order {number} more",
    "read page {number}",
    "feed {person}",
    "take out the {noun}",
    "close the {noun}",
)
REMINDER_REQUESTS = (
    (
        "Remind me",
        "Please remind me",
        "Can you remind me",
        "I want you to remind me",
        "Do remind me",
        "Set a reminder",
        "Add a reminder",
        "Create a reminder",
        "I need a reminder",
        "Could you set a reminder",
    ),
    (" to {text} at {time}", " at {time} to {text}", " for {time}: {text}", ", {time}: {text}", " {time}: {text}"),
    STOPS,
)
TIMES = (
    "noon",
    "midnight",
    *(f"{hour} o'clock" for hour in range(1, 13)),
    *(f"{hour}:{minute:02d}" for hour in range(24) for minute in range(0, 60, 5)),
    *(f"{hour}{space}{half}" for hour in range(1, 13) for space in ("", " ") for half in ("am", "pm")),
    *(f"{hour}:{minute} {half}" for hour in range(1, 13) for minute in (15, 30, 45) for half in ("am", "pm")),
)
"""Both halves have all of them."""

CONVERSION_REQUESTS = (
    ("", "", "Hi, ", "Hello. ", "Quick: ", "Question: "),
    (
        "convert {amount} {from} to {to}",
        "convert {amount} {from} into {to}",
        "change {amount} {from} to {to}",
        "how many {to} are {amount} {from}",
        "how much is {amount} {from} in {to}",
        "what is {amount} {from} in {to}",
        "what are {amount} {from} in {to}",
        "{amount} {from} in {to}",
        "{amount} {from} to {to}",
        "turn {amount} {from} into {to}",
        "I have {amount} {from}, what is that in {to}",
        "give me {amount} {from} as {to}",
    ),
    ("", "?", ".", ", please."),
)
UNITS = tuple(
    split(units)
    for units in (
        "km miles meters feet inches yards cm mm",
        "kg pounds grams tons ounces",
        "liters gallons cups pints",
        "euros dollars pesos yen USD EUR GBP",
        "seconds minutes hours days weeks months years",
        "bits bytes kilobytes megabytes gigabytes",
        "celsius fahrenheit kelvin",
        "watts kilowatts",
        "acres hectares",
    )
)
"""One kind per line. A pair of units belongs to one half, in this order; the training half has every unit."""

SKIES = split("sunny cloudy rainy foggy windy clear stormy snowy dry humid")


@dataclass(frozen=True)
class ToolRequest:
    """What a user wants, the call for it, and the sentence about its result."""

    text: str
    function: str
    arguments: dict[str, Any]
    result: str
    """The content of the tool's message."""
    sentence: str
    parts: frozenset[str]
    """Template of the text and values filled into it."""
    result_parts: frozenset[str]


def request(function: str, half: Half, choice: random.Random) -> ToolRequest:
    return _REQUESTS[function](half, choice)


def tool(function: str, half: Half, choice: random.Random) -> tuple[dict[str, Any], set[str]]:
    """The function as a client sends it, with its parameters in some order, and its parts."""
    parameters = list(PARAMETERS[function].items())
    choice.shuffle(parameters)
    described = {"name": function}
    if choice.random() < 0.85:
        described["description"] = choice.choice(_pool(half, function))
    properties = {key: dict(schema) for key, schema in parameters}
    if "unit" in properties:
        properties["unit"] = choice.choice(
            ({"type": "string"}, properties["unit"], {"enum": ["fahrenheit", "celsius"]}, properties["unit"])
        )
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    parts = {described["description"]} if "description" in described else set()
    return {"type": "function", "function": {**described, "parameters": schema}}, parts


def _weather(half: Half, choice: random.Random) -> ToolRequest:
    template, city = choice.choice(_pool(half, "weather")), _city(half, choice)
    written, unit = choice.choice(list(UNITS_OF_WEATHER.items()))
    text = template.format(city=city, unit=written).replace(", I mean today", " today")
    degrees, sky = choice.randint(-20, 99), choice.choice(SKIES)
    result = choice.choice(({"temperature": degrees, "sky": sky}, {"sky": sky, "temperature": degrees}))
    sentence = f"It is {degrees} degrees and {sky} in {city}."
    parts = frozenset([template, city])
    return ToolRequest(text, WEATHER, {"city": city, "unit": unit}, _json(result, choice), sentence, parts, frozenset())


def _reminder(half: Half, choice: random.Random) -> ToolRequest:
    template, task = choice.choice(_pool(half, "reminder")), choice.choice(TASKS)
    parts = {template}
    while "{" in task:
        slot = task[task.index("{") + 1 : task.index("}")]
        value = _SLOTS[slot](half, choice)
        parts.add(value)
        task = task.replace(f"{{{slot}}}", value, 1)
    time = choice.choice(TIMES)
    result = choice.choice(("ok", "done", "saved", _json({"saved": True}, choice), _json({"status": "ok"}, choice)))
    return ToolRequest(
        template.format(text=task, time=time),
        REMINDER,
        {"text": task, "time": time},
        result,
        f"I will remind you at {time} to {task}.",
        frozenset(parts),
        frozenset(),
    )


def _conversion(half: Half, choice: random.Random) -> ToolRequest:
    template, amount = choice.choice(_pool(half, "conversion")), _amount(half, choice)
    source, target = choice.choice(_unit_pairs(half))
    text = template.format(amount=amount, to=target, **{"from": source})
    if choice.random() < 0.6:
        text = text[0].upper() + text[1:]
    number_text = _amount(half, choice)
    result = choice.choice(
        (number_text, _json({"result": json.loads(number_text)}, choice), _json({"result": number_text}, choice))
    )
    return ToolRequest(
        text,
        CONVERSION,
        {"amount": json.loads(amount), "from": source, "to": target},
        result,
        f"That is {number_text} {target}.",
        frozenset([template, amount, _pair(source, target)]),
        frozenset([number_text]),
    )


_REQUESTS: Mapping[str, Callable[[Half, random.Random], ToolRequest]] = {
    WEATHER: _weather,
    REMINDER: _reminder,
    CONVERSION: _conversion,
}


@cache
def _pool(half: Half, what: str) -> tuple[str, ...]:
    columns: Mapping[str, Sequence[Sequence[str]]] = {
        **DESCRIPTIONS,
        "weather": WEATHER_QUESTIONS,
        "reminder": REMINDER_REQUESTS,
        "conversion": CONVERSION_REQUESTS,
    }
    return composed(half, *columns[what])


@cache
def _of_half(words: tuple[str, ...], half: Half) -> tuple[str, ...]:
    return tuple(word for word in words if half_of(word) is half)


def _city(half: Half, choice: random.Random) -> str:
    kind = choice.random()
    if kind < 0.4:
        return choice.choice(_of_half(CITIES, half))
    if kind < 0.75:
        return proper_name(half, choice)
    while True:
        joined = f"{choice.choice(BEFORE_A_CITY)} {proper_name(half, choice)}"
        if half_of(joined) is half:
            return joined


@cache
def _unit_pairs(half: Half) -> tuple[tuple[str, str], ...]:
    pairs = (pair for units in UNITS for pair in permutations(units, 2))
    return tuple(pair for pair in pairs if half_of(_pair(*pair)) is half)


def _pair(source: str, target: str) -> str:
    """The part of an example that names two units: a template, since a request may name them in any order."""
    return f"{{amount}} {source} in {target}"


def _amount(half: Half, choice: random.Random) -> str:
    """An integer, or a number with one or two decimals."""
    kind = choice.random()
    while True:
        integer = choice.randint(2, 9999 if kind < 0.2 else 99)
        text = (
            str(integer) if kind < 0.6 else f"{integer}.{choice.choice(('', '', '0', '2', '7'))}{choice.randint(1, 9)}"
        )
        if half_of(text) is half:
            return text


def _json(value: Any, choice: random.Random) -> str:
    """Spaced as Python writes it, or without spaces."""
    return json.dumps(value, separators=choice.choice(((", ", ": "), (",", ":"))))


_SLOTS: Mapping[str, Callable[[Half, random.Random], str]] = {
    "noun": noun,
    "person": proper_name,
    "number": lambda half, choice: str(number(half, choice)),
}
