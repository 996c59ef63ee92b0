"""What is sent: prompts, output lengths, adapters and arrival times, from a command line, a seed or a file.

A setting that would have no effect is rejected before anything is sent.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

ADAPTER_DISTRIBUTIONS = ("zipf", "uniform", "distinct", "trace")
_FORMS = "128, uniform:64-256, normal:128,32, lognormal:128,2 (median, factor) or exponential:128"


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of lengths; draws are at least 1."""

    text: str
    """The text of the option."""
    _draw: Callable[[Generator, int], np.ndarray]

    def draw(self, generator: Generator, count: int) -> list[int]:
        # [count]
        drawn = self._draw(generator, count)
        return [max(1, round(float(value))) for value in drawn]

    @classmethod
    def read(cls, text: str) -> "LengthDistribution":
        """Raises ValueError with a sentence."""
        name, colon, rest = text.partition(":")
        try:
            if not colon:
                fixed = int(text)
                return cls(text, lambda generator, count: np.full(count, fixed))
            first, *others = (float(part) for part in rest.replace("-", ",").split(","))
            draw = _DRAWS[name](first, *others)
        except (KeyError, ValueError, TypeError):
            raise ValueError(f"{text!r} is not a length: write {_FORMS}") from None
        return cls(text, draw)


def _uniform(low: float, high: float) -> Callable[[Generator, int], np.ndarray]:
    if low > high:
        raise ValueError
    return lambda generator, count: generator.integers(int(low), int(high) + 1, count)


def _normal(mean: float, deviation: float) -> Callable[[Generator, int], np.ndarray]:
    return lambda generator, count: generator.normal(mean, deviation, count)


def _lognormal(median: float, factor: float) -> Callable[[Generator, int], np.ndarray]:
    return lambda generator, count: generator.lognormal(math.log(median), math.log(factor), count)


def _exponential(mean: float) -> Callable[[Generator, int], np.ndarray]:
    return lambda generator, count: generator.exponential(mean, count)


_DRAWS: dict[str, Callable[..., Callable[[Generator, int], np.ndarray]]] = {
    "uniform": _uniform,
    "normal": _normal,
    "lognormal": _lognormal,
    "exponential": _exponential,
}


def adapters(
    distribution: str, names: Sequence[str], count: int, generator: Generator, exponent: float
) -> list[str | None]:
    """The adapter of each of `count` requests, None for the base model if there are no names.

    `zipf`: the k-th name has weight 1 / k ** exponent. `distinct`: one after another, each used as often as the others.
    """
    if not names:
        return [None] * count
    if distribution == "distinct":
        return [names[index % len(names)] for index in range(count)]
    # [len(names)]
    weights = np.arange(1, len(names) + 1, dtype=float) ** -(exponent if distribution == "zipf" else 0.0)
    chosen = generator.choice(len(names), size=count, p=weights / weights.sum())
    return [names[index] for index in chosen]


def arrivals(rate: float, burstiness: float, count: int, generator: Generator) -> list[float]:
    """Seconds from the start at which each request arrives; all at once for an infinite rate.

    Gaps have a gamma distribution of shape `burstiness` and mean 1 / rate; shape 1 is a Poisson process, an infinite
    one sends at constant distances.
    """
    if math.isinf(rate):
        return [0.0] * count
    # [count]
    if math.isinf(burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count)
    return [float(value) for value in np.cumsum(gaps)]


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
class WorkloadShape:
    """How requests are drawn."""

    num_requests: int
    input_length: LengthDistribution
    """Length in tokens of the tokenizer, or in words without one."""
    output_length: LengthDistribution
    prefix_length: int = 0
    """Length of the prefix that requests share, in the same unit."""
    num_prefixes: int = 1
    adapters: tuple[str, ...] = ()
    adapter_distribution: str = "zipf"
    zipf_exponent: float = 1.0
    request_rate: float = float("inf")
    burstiness: float = 1.0
    seed: int = 0


def drawn(shape: WorkloadShape, count: Count | None) -> list[Planned]:
    """Requests with random English words; `count` makes them exact in tokens."""
    generator = np.random.default_rng(shape.seed)
    inputs = shape.input_length.draw(generator, shape.num_requests)
    outputs = shape.output_length.draw(generator, shape.num_requests)
    names = adapters(shape.adapter_distribution, shape.adapters, shape.num_requests, generator, shape.zipf_exponent)
    starts = arrivals(shape.request_rate, shape.burstiness, shape.num_requests, generator)
    prefixes = [_text(generator, shape.prefix_length, count, "") for _ in range(shape.num_prefixes)]
    chosen = generator.integers(0, shape.num_prefixes, shape.num_requests)
    totals = [length + shape.prefix_length for length in inputs]
    prompts = [_text(generator, size, count, prefixes[index]) for size, index in zip(totals, chosen, strict=True)]
    return [Planned(*fields) for fields in zip(prompts, outputs, names, starts, strict=True)]


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


def rows(path: Path, max_rows: int) -> Rows:
    """The first requests of a dataset file: JSON lines with `prompt`, and optionally `output_tokens`, `adapter` and
    `at`; or ShareGPT's JSON list of `conversations`. Raises ValueError with a sentence.
    """
    text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is neither a JSON list nor JSON lines: {error}") from None
    if not values:
        raise ValueError(f"{path} has no requests")
    return [_row(path, number, row) for number, row in enumerate(values[:max_rows], 1)]


def read(dataset: Rows, shape: WorkloadShape) -> list[Planned]:
    """Requests of a dataset. What it does not give is drawn; adapters only if it names none at all."""
    generator = np.random.default_rng(shape.seed)
    outputs = shape.output_length.draw(generator, len(dataset))
    names: Sequence[str | None] = [row.get("adapter") for row in dataset]
    if all(name is None for name in names):
        names = adapters(shape.adapter_distribution, shape.adapters, len(dataset), generator, shape.zipf_exponent)
    starts = arrivals(shape.request_rate, shape.burstiness, len(dataset), generator)
    return [
        Planned(row["prompt"], int(row.get("output_tokens", output)), name, float(row.get("at", moment)))
        for row, output, name, moment in zip(dataset, outputs, names, starts, strict=True)
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


NUM_PROMPTS = 100
"""Number of requests, unless the command line or the dataset says fewer."""
_LEAST = {"num_prompts": 1, "num_prefixes": 1, "prefix_len": 0, "num_warmups": 0, "max_concurrency": 1}
_OF_PROMPTS = ("input_len", "prefix_len", "num_prefixes", "tokenizer")
"""How prompts are made."""


def plan(options: argparse.Namespace) -> list[Planned]:
    """The requests of a command line. Raises ValueError with a sentence, or OSError."""
    for name, least in _LEAST.items():
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"{_flag(name)} must be at least {least}")
    if not options.request_rate > 0 or (options.burstiness is not None and not options.burstiness > 0):
        raise ValueError("--request-rate and --burstiness must be above 0")
    names = _names(options.adapters)
    if options.adapters and not names:
        raise ValueError(f"--adapters {options.adapters} names no adapter")
    if sentence := next(_without_effect(options), None):
        raise ValueError(sentence)
    shape = WorkloadShape(
        NUM_PROMPTS if options.num_prompts is None else options.num_prompts,
        options.input_len or LengthDistribution.read("128"),
        options.output_len or LengthDistribution.read("64"),
        options.prefix_len or 0,
        options.num_prefixes or 1,
        names,
        options.adapter_distribution or "zipf",
        1.0 if options.zipf_exponent is None else options.zipf_exponent,
        options.request_rate,
        1.0 if options.burstiness is None else options.burstiness,
        options.seed,
    )
    if options.dataset is None:
        return drawn(shape, None if options.tokenizer is None else _counter(options.tokenizer))
    dataset = rows(options.dataset, shape.num_requests)
    if sentence := next(_without_effect_on(dataset, options), None):
        raise ValueError(sentence)
    return read(dataset, shape)


def summary(planned: Sequence[Planned]) -> str:
    """How many requests there are, and for how many adapters."""
    names = {request.adapter for request in planned} - {None}
    return f"{len(planned)} requests" + (f" with {len(names)} adapters" if names else "")


def _without_effect(options: argparse.Namespace) -> Iterator[str]:
    """A sentence for each setting that the others make useless."""
    if options.dataset is not None:
        for name in _OF_PROMPTS:
            if getattr(options, name) is not None:
                yield f"{_flag(name)} has no effect with --dataset, which has the prompts: leave it out"
    if options.num_prefixes is not None and not options.prefix_len:
        yield "--num-prefixes has no effect without --prefix-len: give that, or leave it out"
    if options.burstiness is not None and math.isinf(options.request_rate):
        yield "--burstiness has no effect without --request-rate: give that, or leave it out"
    yield from _adapters_without_effect(options)
    if options.save_texts and options.result is None:
        yield "--save-texts has no effect without --result: give that, or leave it out"
    if options.label and options.result is None and options.html is None:
        yield "--label has no effect without --result or --html: give one, or leave it out"


def _adapters_without_effect(options: argparse.Namespace) -> Iterator[str]:
    distribution = options.adapter_distribution
    if distribution == "trace":
        if options.dataset is None:
            yield "--adapter-distribution trace needs --dataset, whose lines name adapters"
        if options.adapters:
            yield "--adapters has no effect with --adapter-distribution trace: leave one of them out"
    elif distribution is not None and not options.adapters:
        yield f"--adapter-distribution {distribution} has no effect without --adapters: give that, or leave it out"
    if options.zipf_exponent is not None and (not options.adapters or distribution not in (None, "zipf")):
        yield "--zipf-exponent has no effect without --adapters by zipf: leave it out"


def _without_effect_on(rows: Rows, options: argparse.Namespace) -> Iterator[str]:
    """One sentence for each setting that this dataset makes useless, or that needs what the dataset does not have."""
    path, has = options.dataset, {name: [name in row for row in rows] for name in ("output_tokens", "at")}
    if options.num_prompts is not None and len(rows) < options.num_prompts:
        yield f"{path} has {len(rows)} requests: give --num-prompts {len(rows)} or fewer, or leave it out to send all"
    if options.output_len is not None and all(has["output_tokens"]):
        yield f"--output-len has no effect, because each request of {path} has `output_tokens`: leave it out"
    if not math.isinf(options.request_rate) and all(has["at"]):
        yield f"--request-rate has no effect, because each request of {path} has `at`: leave it out"
    is_named = any(row.get("adapter") is not None for row in rows)
    if is_named and options.adapters:
        yield f"{path} names adapters, and --adapters does as well: leave that out, or remove `adapter` from the file"
    if not is_named and options.adapter_distribution == "trace":
        yield f"--adapter-distribution trace has no effect, because {path} names no adapter: leave it out"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _names(text: str) -> tuple[str, ...]:
    if text.startswith("@"):
        text = ",".join(Path(text[1:]).read_text().split())
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _counter(folder: str) -> Count:
    import tokenizers

    path = Path(folder) / "tokenizer.json" if Path(folder).is_dir() else Path(folder)
    if not path.is_file():
        raise ValueError(f"--tokenizer {folder} is not a folder with tokenizer.json")
    loaded = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: len(loaded.encode(text).ids)
