"""What is sent: prompts, output lengths, adapters and arrival times, drawn from a seed or read from a file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from lorikeet.launcher.bench import draws

Count = Callable[[str], int]
"""Tokens of a text."""
Rows = list[dict[str, Any]]
"""Requests of a dataset, as the file has them."""

_TEXT = """
able above after air also any ask ball bear bed before bell better black boat book box bring build busy came car cat
chance chart city clean cloud cold cook corn count cross cut dark deal desk door draw drive dry early east edge even
face fair farm father field find fire fish floor fold foot form free friend full gave give gold grass green group half
happy hat hear help hill home hot house inch job jump keep king know land last laugh learn left letter life light line
little long lost low main map market meat mile mind moon morning mother move music near need new night noise nose
number often old open other own paint paper pass path place plant point poor pull quick race ran read real rest ride
ring road roll root round run said salt sand say sea second seem send seven sharp shoe short side silver since sister
size sky slow smell soft some soon south speak spring star stay step stone store street study summer sure table take
tall team ten thank thin third time today took town train tree true turn under until valley view voice walk want wash
water way west white wide wind wing wish wood work write yellow
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Planned:
    """One request."""

    prompt: str
    num_output: int
    """Tokens that are asked for."""
    adapter: str | None = None
    at: float = 0.0
    """Seconds from the start of an open loop."""


@dataclass(frozen=True)
class Shape:
    """How requests are drawn."""

    num_requests: int
    input_length: draws.Length
    """In tokens of the tokenizer, or in words where there is none."""
    output_length: draws.Length
    prefix_length: int = 0
    """Length of the prefix that requests share, in the same unit."""
    num_prefixes: int = 1
    adapters: tuple[str, ...] = ()
    adapter_distribution: str = "zipf"
    zipf_exponent: float = 1.0
    request_rate: float = float("inf")
    burstiness: float = 1.0
    seed: int = 0


def drawn(shape: Shape, count: Count | None) -> list[Planned]:
    """Requests with random English words; `count` makes them exact in tokens."""
    generator = np.random.default_rng(shape.seed)
    inputs = shape.input_length.draw(generator, shape.num_requests)
    outputs = shape.output_length.draw(generator, shape.num_requests)
    names = draws.adapters(
        shape.adapter_distribution, shape.adapters, shape.num_requests, generator, shape.zipf_exponent
    )
    at = draws.arrivals(shape.request_rate, shape.burstiness, shape.num_requests, generator)
    prefixes = [_text(generator, shape.prefix_length, count, "") for _ in range(shape.num_prefixes)]
    chosen = generator.integers(0, shape.num_prefixes, shape.num_requests)
    whole = [length + shape.prefix_length for length in inputs]
    prompts = [_text(generator, size, count, prefixes[index]) for size, index in zip(whole, chosen, strict=True)]
    return [Planned(*each) for each in zip(prompts, outputs, names, at, strict=True)]


def _text(generator: Generator, length: int, count: Count | None, beginning: str) -> str:
    """Random words after `beginning`, `length` long together."""
    words = beginning.split()
    if count is None:
        return " ".join([*words, *_some_words(generator, length - len(words))])
    tokens = count(beginning) if beginning else 0
    while tokens < length:  # a word has at least one token, so this never exceeds the length by much
        words += _some_words(generator, max(1, (length - tokens) // 2))
        tokens = count(" ".join(words))
    while tokens > length and len(words) > 1:
        words.pop()
        tokens = count(" ".join(words))
    for _ in range(64):
        if tokens >= length:
            break
        longer = [*words, *_some_words(generator, 1)]
        if (grown := count(" ".join(longer))) <= length:
            words, tokens = longer, grown
    return " ".join(words)


def _some_words(generator: Generator, count: int) -> list[str]:
    return [_WORDS[index] for index in generator.integers(0, len(_WORDS), max(0, count))]


def rows(path: Path, most: int) -> Rows:
    """The first requests of a dataset file: JSON lines with `prompt`, and where given `output_tokens`, `adapter` and
    `at`; or ShareGPT's JSON list of `conversations`. Raises ValueError with a sentence.
    """
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is neither a JSON list nor JSON lines: {error}") from None
    if not found:
        raise ValueError(f"{path} has no requests")
    return [_row(path, number, row) for number, row in enumerate(found[:most], 1)]


def read(given: Rows, shape: Shape) -> list[Planned]:
    """Requests of a dataset. What it does not give is drawn; adapters only where it names none at all."""
    generator = np.random.default_rng(shape.seed)
    outputs = shape.output_length.draw(generator, len(given))
    names: Sequence[str | None] = [row.get("adapter") for row in given]
    if all(name is None for name in names):
        names = draws.adapters(shape.adapter_distribution, shape.adapters, len(given), generator, shape.zipf_exponent)
    at = draws.arrivals(shape.request_rate, shape.burstiness, len(given), generator)
    return [
        Planned(row["prompt"], int(row.get("output_tokens", output)), name, float(row.get("at", moment)))
        for row, output, name, moment in zip(given, outputs, names, at, strict=True)
    ]


def _row(path: Path, number: int, row: Any) -> dict[str, Any]:
    if isinstance(row, dict) and row.get("conversations"):
        row = {"prompt": row["conversations"][0].get("value")}
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise ValueError(f"{path}: request {number} has no `prompt`")
    kinds = {"output_tokens": int, "adapter": str | None, "at": int | float}
    for name, kind in kinds.items():
        if name in row and not isinstance(row[name], kind):
            raise ValueError(f"{path}: `{name}` of request {number} is {row[name]!r}")
    return row
